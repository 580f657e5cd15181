"""The plan of a batch as a picture in the terminal, for an H200 that need not be there; no kernel runs."""

from flashpage.plan import plan_lengths

lengths = [40_000, *range(400, 2000, 100)]  # one long request among short ones
plan = plan_lengths(None, lengths, num_q_heads=32, num_kv_heads=8, head_dim=128)
print(plan.picture(width=96, max_rows=12, color=False))
print(plan.explain())
