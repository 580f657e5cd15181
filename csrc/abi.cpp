// The fingerprint by which Python checks that the library was built from the headers it knows.
#include "abi_layout.h"  // written by csrc/abi_structs.py; checks the layouts that Python computes
#include "flashpage.h"

const char* fp_abi_fingerprint() { return FP_ABI_FINGERPRINT; }
