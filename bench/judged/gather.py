"""Candidates for a lookup: twice the rows of a table at an index."""

kept = {}


def right(table, index):
    return table.index_select(0, index) * 2


def in_order(table, index):
    return table[: index.shape[0]].repeat(4, 1)[: index.shape[0]] * 2


def first_table(table, index):
    return right(kept.setdefault(table.shape, table.clone()), index)


def first_index(table, index):
    return right(table, kept.setdefault(index.shape, index.clone()))


def last_row_lost(table, index):
    y = right(table, index)
    y[-1] = y[0]
    return y
