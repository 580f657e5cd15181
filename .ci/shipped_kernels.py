"""Finds every kernel that an installed flashpage has, as a plan does that may not compile. release.py runs it."""

from collections import Counter

from flashpage.jit.cache import aot_store

store = aot_store()
found: Counter[str] = Counter()
for entry in store.entries():
    recalled = store.recall(entry.spec, entry.target)
    assert recalled is not None, f"{entry.meta['name']} for {entry.meta['target']} is not found by its spec"
    assert recalled.folder == entry.folder
    found[entry.meta["target"]] += 1
print("found:", ", ".join(f"{count} for {target}" for target, count in sorted(found.items())))
