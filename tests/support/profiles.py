"""Cards under whose rows of the table of cards tests plan (FLASHPAGE_CARD): one for each kind that a user may have."""

PROFILES = (
    *("RTX 3090", "RTX 4090", "L40S", "RTX 5090", "GB10", "A100"),
    *("H100", "H100 PCIe", "H20", "H100:16", "B200"),
)
