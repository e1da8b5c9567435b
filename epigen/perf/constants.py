"""The constants of the analytic model: what no datasheet says.

Each stands for something physical that other GPUs share, and none for a single shape or config. Fitted by `bench/model.py --fit` to the
5,572 measured configs of tests/data/sweep_*.json (fp16 on an H200, torch 2.11, Triton 3.6, 2026-11), then rounded; those that these
tables cannot tell, and those of narrow loads, were set by hand; outside_clocks to the persistent ones of sample_skinny16.json; those of the
vendor's product, of split k and of how TMA's kernels begin to 429 configs of 44 random shapes (bf16, the same GPU and versions); and those
of crossings, of TMA's stores and of what is torn to the 1,990 configs of 132 random shapes in tests/data/shapes.json, as well as to the
sample_*.json; and those of what multiprocessors ask L2 for together, of stages held and of late inputs to the 4,224 trials of the searches
of 88 random problems, and to 9 shapes with five orders of their tiles (tests/perf/test_model.py); late_us and vendor_us set again by hand when
all schedules could load inputs early; and arriving_share to both ways to share a long product, of 149 in tests/data/ways.json. apart_clocks
was doubled when orders of tiles had been measured on an H100 (tests/perf/test_model.py), which the random shapes of the H200 do not tell apart;
tma_even_smooth set by hand to the tuned layers of 256 rows on an H100: those of an H200 by TMA, 11 % too slow without it, are 4 % too slow;
and alone_share, beside_alu, issued_clocks, grouped_share, and again outside_clocks, descriptors_us, apart_clocks and tma_even_smooth to the trials of the
first 43 of 83 random problems on an H100 (tests/data/shapes_h100.json) beside all of these. Of the other 40, and of 26 of the 111
on an H200 (tests/data/shapes_h200.json), part_us alone was set, and one showed that promoted sums are slow in ping-pong.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Constants:
    """Times in microseconds, unless the name has another unit; shares of one."""

    # multiplying
    tensor_share: float = 1.0  # of the tensor cores' peak while they have work
    sync_share: float = 0.35  # of it, what the older instruction reaches where there is wgmma
    older_share: float = 0.8  # of it, where the older instruction is the only one
    plain_share: float = 0.5  # fp32 without tensor cores: the operands come through the same ports as the results
    mma_clocks: float = 6.0  # the older instruction: 16x8x16 products of fp16 by one warp, with the operands' way from shared memory
    mma_chain_clocks: float = 30  # ... of which each along k waits so long for the one before
    wait_clocks: float = 20  # wgmma: from the last of a step's products to its result, and the barrier
    turned_clocks: float = (
        0.7  # an element of 32 bits that lies across k, which wgmma takes along k alone: 26 configs of 7616x4224x320 in tf32 "nn", 0.5 to 0.9
    )
    chain_clocks: float = 10  # wgmma: each product along k, of 16 fp16, that adds to the same accumulators
    shared_bytes_clock: float = 120  # shared memory of one multiprocessor: 128 on every GPU in the table, less bank conflicts
    arriving_share: float = 0.4  # of what TMA writes there, which takes of that width from what is multiplied
    spilled: float = 1.0  # share of the registers a thread can have, beyond which the main loop ...
    spill: float = 1.3  # ... takes so much longer: 128x256 with 4 warps
    beside_alu: float = 2.4  # in ping-pong an epilogue's instructions take so many times as long as they are issued

    # loading
    l2_bytes_clock: float = 64  # from L2 into one multiprocessor: the port's width
    alone_share: float = 0.4  # of the time of L2's bytes, what they take where one multiprocessor alone asks for them
    crossing_clocks: float = 0.6  # a run of up to 128 bytes that lies across two lines of L2
    torn_clocks: float = 3.6  # ... and one that begins within a sector of 32 bytes: by TMA 4.3 to 4.9 for a run that else takes 2, of rows of 16 bytes more
    apart_clocks: float = 2.6  # a run of 128 bytes that a multiprocessor's TMA asks for, and in a better order of tiles would share with those beside it
    row_clocks: float = 1.4  # a multiprocessor's request for a row of a tile, however few its bytes: the tag look-up of its line
    request_clocks: float = 0.45  # what such a request adds to the time of its bytes
    b_along_k: float = 1.6  # rows of b that lie along k take so much longer than a's: seen at 4096x4096x4096 and 8192x8192x1024, "nt" against "nn"
    copy_clocks: float = 30  # a warp issues copies of 16 bytes a thread, with their addresses and masks
    # Each row of 128 bytes that lies outside of an operand, where TMA fills in zeros: 48 of a tile of 64 rows where M is 16. By the mean over all tiles, not by the
    # multiprocessor that has most of them: of 2,700 configs of random problems that one explains nothing, the mean 6 to 7 clocks a row (H100 and H200, 2026-11-28).
    outside_clocks: float = 6.0
    l2_us: float = 0.4  # a load's latency
    dram_us: float = 0.26  # what missing L2 adds to it
    memory_bare: float = 0.33  # of the memory's time for the operands that nothing hides

    # loading element by element, for want of an asynchronous copy below 4 bytes
    narrow_clocks: float = 4.7  # a multiprocessor loads 32 elements, each with a load, a store to shared memory, its address and its mask
    narrow_warp_clocks: float = 13.0  # one warp alone does
    narrow_us: float = 0.6  # latency of a step: load, store, wait, multiply
    narrow_smooth: float = 4.5  # as `smooth`, of blocks that share a multiprocessor in such a step: they wait for each other more
    narrow_spill_ns: float = 66.0  # each register too few in such a step: its way to memory and back

    # blocks and kernels
    smooth: float = 5.5  # exponent of the norm that joins what overlaps: higher is nearer to a plain maximum
    tma_smooth: float = 14.0  # as `smooth`, of loads that no warp has to issue: they wait for each other less
    tma_memory_smooth: float = 2.3  # ... and of the memory's whole time with that of all steps, which it shares no evener than the tiles come
    tma_even_smooth: float = 3.0  # ... more than that where one round is all, and many tiles share what is read; over the number of rounds
    block_us: float = 0.01  # starting a block, and again the barriers around its epilogue
    overlap: float = 0.75  # of fill and epilogue left bare where another block computes meanwhile
    exchange_clocks: float = 3.2  # one value that a warp passes on to the others of its block, through shared memory
    arrival_us: float = 1.0  # until all that a block has written is seen by the GPU, and its arrival counted
    gap_us: float = 1.4  # between two kernels of one stream
    short_run: float = 0.4  # each halving of a row of the vendor's result below 256 bytes makes reading it so much longer
    vendor_us: float = 2.0  # the vendor's kernel beyond its arithmetic: fill and drain
    vendor_written: float = 1.4  # times that its result's bytes count, which no later tile of many hides as it does those that are read
    vendor_split_us: float = 2.0  # ... and where it splits k: to add up the parts
    # The vendor's product with a pass behind it: that writes what the product has left in L2. Set to 168 such random problems on both GPUs, which were off by
    # 15 % in the root mean square where the product was held to have written all; with 64 more they are by 10 %.
    followed_bare: float = 0.1  # of the shorter of arithmetic and memory, what nothing hides ...
    followed_thin_bare: float = 0.4  # ... and of few rows
    followed_again: float = 1.85  # times that the pass moves the result, which it reads while the product's last of it is written ...
    followed_l2: float = 0.35  # ... but of what can lie in so much of L2 ...
    followed_held: float = 0.55  # ... so much less
    issued_clocks: float = 100  # where the warps that multiply also ask TMA for the tiles to come: each step
    held_stages: float = 0.5  # in ping-pong, the warpgroup that begins finds so much of a stage still held by the other
    late_us: float = 0.2  # until what the epilogue reads is there, where it was not asked for under the main loop
    stored_share: float = 0.2  # of the memory's time for what TMA stores, which it does while the next tile is multiplied
    torn_bytes: float = 100  # that a piece of an output's row, as a tile has it, moves besides where rows do not begin with a line of L2
    # What pointers load in the layout of wgmma's accumulators, 16 bytes of a row at a time, costs the memory so much again: set by hand to 23 kernels on an
    # H100 with [M, N] inputs by pointers, which 48 with such inputs by TMA or none do not need (bench.tiles, Triton 3.6, 2026-11-27).
    pointed_again: float = 1.0
    descriptors_us: float = 0.7  # until the first descriptors have been fetched
    flattened_us: float = 0.1  # what the loop that is one of two takes to begin and to end
    part_us: float = 0.05  # the last block of a tile waits for each part that it adds up
    gather_share: float = 0.45  # of what L2 feeds one multiprocessor: the last block of a tile reads one part after the other
    grouped_share: float = 0.7  # ... and where the loads of a part are under way together, which Gluon's order leaves registers for


FITTED = Constants()
