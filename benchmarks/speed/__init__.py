"""Speed and memory: always ratios of interleaved repeats in one run. A folder for each part, with what it measures
(`measure.py`), its options (`options.py`), its page (`page.py`) and its plots (`plots.py`); what parts share is beside them."""
