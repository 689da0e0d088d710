"""Private means of sparse rows: time and memory, l1 recovery's reach, and how errors grow beside the paper's rates."""
