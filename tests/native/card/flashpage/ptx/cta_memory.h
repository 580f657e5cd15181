// Small kernels have no dynamic shared memory.
#pragma once
#include "flashpage/common/types.h"
