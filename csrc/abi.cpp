// Tells Python, when it loads the library, which headers the library was built from.
#include "abi_layout.h"  // written by csrc/abi_structs.py; checks the layouts that Python computes
#include "flashpage.h"

const char* fp_abi_fingerprint() { return FP_ABI_FINGERPRINT; }
