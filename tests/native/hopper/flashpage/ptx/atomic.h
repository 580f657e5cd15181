#include "../../../card/flashpage/ptx/atomic.h"
