"""Watches public calls: logs them, keeps the inputs of failing ones, runs those again, and times the CTAs of a run.

calls       wraps the public functions when flashpage is imported with FLASHPAGE_LOG, FLASHPAGE_DUMP or FLASHPAGE_NVTX
            set; otherwise nothing is wrapped, and no call pays for any of it
describe    tensors and values as words of a log line
dump        a call's inputs in a file
replay      such a call on a card, on the CPU and by the reference; the first place where they part
reference   attention in fp64 from the inner interface's arguments
timeline    stamps of each CTA of a run next to what its plan predicted
"""
