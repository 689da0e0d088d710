# %% [markdown]
# # A click model from a CSV
#
# From a file to a model with a promise, with three commands. The file is made here: 20,000 rows of a log with columns of its own.

# %%
import csv

import numpy as np

draw = np.random.default_rng(0)
rows = 20_000
ads, sites = draw.zipf(1.3, rows) % 500, draw.integers(0, 30, rows)
price = draw.gamma(2.0, 3.0, rows).round(2)
liked = draw.normal(0, 1.5, 500)  # what nobody sees: which ads are good
clicked = draw.random(rows) < 1 / (1 + np.exp(1.5 - liked[ads] - 0.05 * price))

with open("clicks.csv", "w", newline="") as file:
    writer = csv.writer(file)
    writer.writerow(["clicked", "ad", "site", "price"])
    writer.writerows(zip(clicked.astype(int), (f"ad-{ad}" for ad in ads), (f"site {site}" for site in sites), price))
with open("clicks.csv") as file:
    print(file.read(130))

# %% [markdown]
# `sparsedp init` looks at the file, says what it takes each column for and why, and writes a configuration.

# %%
# !sparsedp init clicks.csv

# %% [markdown]
# The configuration can be changed in the file, or on the command line. A small model, three epochs, epsilon 3:

# %%
# !sparsedp train clicks.yaml --run-dir run --quiet --set training.epochs=3 --set training.batch_size=1000

# %% [markdown]
# The folder `run/release` may leave; the statement in it says what is promised, and what that rests on.

# %%
# !cat run/release/statement.txt
# !ls run/release

# %% [markdown]
# From here: [your own data](../your-data.md), [which mechanism](../which-mechanism.md), [reports](../report.md).
