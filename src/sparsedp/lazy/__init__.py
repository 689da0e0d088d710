"""LazyDP's bookkeeping: noise that rows of a table are still owed, and giving it to them before anybody reads them."""

from sparsedp.lazy.pace import Coefficients, Pace
from sparsedp.lazy.tables import LazyTables

__all__ = ["Coefficients", "LazyTables", "Pace"]
