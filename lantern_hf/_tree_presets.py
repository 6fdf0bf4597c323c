"""Preset trees as data: one word per node, one digit per rank, in node order. `lantern_hf.tree.TREES` reads them."""

from __future__ import annotations

PRESETS: dict[str, str] = {
    # The first six are the trees of the published LANTERN and EAGLE code (their names there in brackets), named here
    # after the nodes they really have. The narrow ones are ours: on a CPU each node costs, so 8 to 12 nodes win.
    # [chain]
    "chain_5": "0 00 000 0000 00000",
    # [mc_sim_7b_63]
    "eagle_25": """
        0 1 2 3
        00 01 02 10 11 20 21 30
        000 001 002 010 011 020 021 100
        0000 0001 0002
        00000 00001
    """,
    # [mc_sim_7b_63_balanced]
    "balanced_25": """
        0 1 2
        00 01 02 10 11 12 20 21
        000 001 002 010 011 100 101 110 111
        0000 0001 0002
        00000 00001
    """,
    # [reverse_balanced_25]
    "deep_25": """
        0 1 2
        00 01 10 20
        000 001 002 010 011 100
        0000 0001 0002 0010 0011
        00000 00001 00002 00003 00010 00011 00012
    """,
    # [naive_extend_57]
    "wide_57": """
        0 1 2 3 4
        00 01 02 03 10 11 12 20 21 22 30 31 40
        000 001 002 003 010 011 012 020 021 022 030 031 100 101 110 200
        0000 0001 0002 0003 0010 0011 0012 0020 0021 0030 0100 0101 0110 0200
        00000 00001 00002 00010 00011 00100 00101 00110 00200
    """,
    # [medusa_2_7b_63]
    "medusa_63": """
        0 1 2 3 4 5 6 7 8 9
        00 01 02 03 04 05 06 07 08 09 10 11 12 13 14 20 21 30 31 40 50 60 70
        000 001 002 003 004 005 006 007 008 010 011 012 013 020 021 030 040 050 100 101 102 110 200
        0000 0001 0002 0003 0010 0020 0100
    """,
    "narrow_8": "0 1 2 00 01 10 000 0000",
    "narrow_12": "0 1 2 3 00 01 10 20 000 001 100 0000",
}
