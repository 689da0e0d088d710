"""The page "How fast is it": a section for each part of `sparsedp bench`, made from its JSON."""
