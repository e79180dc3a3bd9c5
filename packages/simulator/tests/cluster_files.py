"""Cluster files for tests: right ones, and wrong ones, each with the message that names what is wrong."""

LAB = """
name = "lab"
device = "h100-80g-sxm"
notes = "as ordered"

[nodes]
count = 4
devices = 8

[links.inter]
kind = "roce"
nics_per_node = 4
rails = 4
oversubscription = 2

[[slow_ranks]]
rank = 5
factor = 1.2

[[slow_links]]
nodes = [0, 3]
factor = 2.5
"""
ROW = """
[[kernel]]
kind = "matmul"
dtype = "bfloat16"
seconds = 1e-4
source = "here"
shape = [64, 64, 32]
"""
WHOLE = """
[device]
name = "toy"
peak_flops = { float32 = 1e12 }
memory_bandwidth = 1e11
memory_bytes = 1_000_000_000
sms = 10
[nodes]
count = 2
[links]
intra = { kind = "pcie", bandwidth = 1e10, latency = 1e-6 }
inter = { bandwidth = 1e9, latency = 1e-5 }
"""
STACK = """
stack = "liger"
device = "h100-80g-sxm"
[attention.flash-3]
source = "arXiv 2407.08608: up to 740 TFLOP/s in FP16, 75 % of an H100"
hopper = [0.75, 0.6]
[stacks.liger]
attention = "flash-3"
lowering = "one kernel"
optimizer = "foreach"
fused = ["norm", "loss"]
saved = "what autograd saves"
overlap = ["gradient buckets"]
source = "here"
"""
MIXED = """
name = "mixed"
[links.inter]
bandwidth = 20e9
[[nodes]]
count = 2
devices = 4
device = "a100-80g-sxm"
[[nodes]]
count = 3
devices = 4
device = { base = "h100-80g-sxm", memory_bytes = 1000 }
[nodes.links.inter]
nics_per_node = 2
latency = 1e-5
[[slow_ranks]]
rank = 19
factor = 2
"""
WRONG = {
    "unknown key": (
        LAB + "factr = 2\n",
        r"slow_links\[0\].factr: no such key; known here: nodes, factor",
    ),
    "unknown key of a table": (
        LAB.replace("rails", "rail"),
        "links.inter.rail: no such key; known here: kind, bandwidth",
    ),
    "zero bandwidth": (
        WHOLE.replace("1e9, latency", "0, latency"),
        "links.inter.bandwidth: 0 stands here; a number from 1 on",
    ),
    "negative number": (
        WHOLE.replace("1e-6", "-1e-6"),
        "links.intra.latency: -1e-06 stands here; a number from 0 on",
    ),
    "not finite": (WHOLE.replace("1e11", "inf"), "device.memory_bandwidth: inf stands here"),
    "text for a number": (
        WHOLE.replace("1e11", '"fast"'),
        "device.memory_bandwidth: 'fast' stands here; a number from 1 on",
    ),
    "truth for a number": (
        LAB.replace("count = 4", "count = true"),
        "nodes.count: True stands here; a whole number from 1 on",
    ),
    "broken number": (
        LAB.replace("count = 4", "count = 4.5"),
        "nodes.count: 4.5 stands here; a whole number",
    ),
    "number for a table": ("nodes = 3\n", "nodes: 3 stands here; a table of keys and values"),
    "table for a list": (
        "slow_ranks = { rank = 1 }\n",
        "slow_ranks: .* stands here; a list is needed",
    ),
    "number for text": ("device = 3\n", "device: 3 stands here; a table"),
    "missing device": (
        "[nodes]\ncount = 2\n",
        'device is missing: device = "NAME" with one of a100-80g-sxm',
    ),
    "unknown device": ('device = "h900"\n', "device: no device 'h900'; known: a100-80g-sxm"),
    "unknown base": ('[device]\nbase = "h900"\n', "device.base: no device 'h900'"),
    "nameless device": ("[device]\nsms = 3\n", "device: name is missing"),
    "incomplete device": (
        WHOLE.replace("memory_bandwidth = 1e11", "").replace(", latency = 1e-5", ""),
        "device.memory_bandwidth, links.inter.latency missing",
    ),
    "unknown kind": (
        LAB.replace("roce", "string"),
        "links.inter.kind: 'string' stands here; one of 'infiniband', 'roce'",
    ),
    "rails without NICs": (
        LAB.replace("rails = 4", "rails = 5"),
        "links.inter.rails: 5 rails with 4 NICs per node",
    ),
    "slow rank that is not there": (
        LAB.replace("rank = 5", "rank = 32"),
        "rank 32 is not there; the ranks are 0 to 31",
    ),
    "fast slow rank": (
        LAB.replace("1.2", "0.5"),
        r"slow_ranks\[0\].factor: 0.5 stands here; a number from 1 on",
    ),
    "slow rank twice": (
        LAB + "[[slow_ranks]]\nrank = 5\nfactor = 2\n",
        r"slow_ranks\[1\]: rank 5 is there twice",
    ),
    "slow rank without a factor": (
        LAB.replace("factor = 1.2", ""),
        r"slow_ranks\[0\]: factor is missing",
    ),
    "link between nodes that are not there": (
        LAB.replace("[0, 3]", "[0, 4]"),
        "node 4 is not there; the nodes are 0 to 3",
    ),
    "link of three nodes": (
        LAB.replace("[0, 3]", "[0, 3, 1]"),
        r"slow_links\[0\].nodes: 3 of them; 2 are needed",
    ),
    "kernel without seconds": (
        LAB + ROW.replace("seconds = 1e-4", ""),
        r"kernel\[0\]: seconds missing",
    ),
    "kernel of no size": (
        LAB + ROW.replace("shape = [64, 64, 32]", ""),
        r"kernel\[0\]: no size given; exactly one of shape, bytes",
    ),
    "kernel of two sizes": (
        LAB + ROW + "bytes = 7\n",
        r"kernel\[0\]: shape and bytes given; exactly one of shape, bytes, flops",
    ),
    "kernel of two dimensions": (
        LAB + ROW.replace("64, 64", "64"),
        r"kernel\[0\].shape: \[64, 32\] stands here, of kind 'matmul'; \[M, N",
    ),
    "shape of a norm": (
        LAB + ROW.replace("matmul", "norm"),
        r"of kind 'norm'; give bytes or flops; only matmul, attention, loss have",
    ),
    "no such kind of kernel": (
        LAB + ROW.replace("matmul", "gemm"),
        r"kernel\[0\].kind: 'gemm' stands here; one of 'matmul', ",
    ),
    "dtype of a kernel": (
        LAB + ROW.replace("bfloat16", "bf16"),
        r"kernel\[0\].dtype: 'bf16' stands here; one of 'float64', ",
    ),
    "kernel in no time": (
        LAB + ROW.replace("1e-4", "0"),
        r"kernel\[0\].seconds: 0 stands here; a number above 0 is needed",
    ),
    "kernel of a negative shape": (
        LAB + ROW.replace("32]", "-1]"),
        r"kernel\[0\].shape\[2\]: -1 stands here; a whole number from 1",
    ),
    "key of a kernel": (
        LAB + ROW + "time = 1\n",
        r"kernel\[0\].time: no such key; known here: kind, op, dtype",
    ),
    "kernel twice": (
        LAB + ROW + ROW,
        r"kernel\[1\]: measured in kernel\[0\] already; one of them is needed",
    ),
    "link twice": (
        LAB + "[[slow_links]]\nnodes = [3, 0]\nfactor = 2\n",
        "the link of nodes 3 and 0 is there twice",
    ),
    "unknown model": (
        'device = "h100-80g-sxm"\n[communication]\nmodel = "fast"\n',
        "communication.model: 'fast' stands here",
    ),
    "missing table": (
        'device = "h100-80g-sxm"\n[communication]\nmessages = "no.csv"\n',
        "communication.messages: cannot read",
    ),
    "unknown stack": (
        'stack = "numpy"\n' + LAB,
        "stack: 'numpy' stands here; one of 'eager', 'inductor', 'megatron'",
    ),
    "a stack that lacks fields": (
        LAB + '[stacks.mine]\nattention = "flash-2"\n',
        "stacks.mine: lowering, optimizer, fused, saved, overlap, source missing",
    ),
    "an unknown field of a stack": (
        STACK.replace("fused", "blended"),
        "stacks.liger.blended: no such key; known here: attention, lowering, optimizer, fused",
    ),
    "an unknown stack beside an own one": (
        STACK.replace('stack = "liger"', 'stack = "tiger"'),
        "stack: 'tiger' stands here; one of 'eager', 'inductor', 'megatron', .*'liger' is needed",
    ),
    "an unknown attention kernel": (
        STACK.replace('attention = "flash-3"', 'attention = "own"'),
        "stacks.liger.attention: no kernel 'own'; known: flash-2, .*flash-3",
    ),
    "an unknown kind that is fused": (
        STACK.replace('"norm"', '"gemm"'),
        r"stacks.liger.fused\[0\]: 'gemm' stands here; one of 'matmul', 'attention'",
    ),
    "an unknown lowering": (
        STACK.replace("one kernel", "jax"),
        "lowering: 'jax' stands here; one of 'torch', 'one kernel' is needed",
    ),
    "attention in one direction": (
        STACK.replace("[0.75, 0.6]", "[0.75]"),
        "attention.flash-3.hopper: 1 of them; 2 are needed",
    ),
    "attention above the peak": (
        STACK.replace("0.75", "75"),
        r"attention.flash-3.hopper\[0\]: 75 stands here; a fraction, above 0 and at most 1",
    ),
    "a stack with a built-in name": (
        STACK.replace("liger", "eager"),
        "stacks.eager: the name is built in; give yours another one than eager, inductor, megatron",
    ),
    "an attention kernel with a built-in name": (
        STACK.replace("flash-3", "flash-2"),
        "attention.flash-2: the name is built in; give yours another one than flash-2",
    ),
    "more than the peak in one dtype": (
        WHOLE.replace("sms = 10", "matmul_fractions = {bfloat16 = 1.5}"),
        "device.matmul_fractions.bfloat16: 1.5 stands here; a fraction,",
    ),
    "more than the peak": (
        WHOLE.replace("sms = 10", "matmul_fraction = 1.5"),
        "device.matmul_fraction: 1.5 stands here; a fraction,",
    ),
    "more than the memory's bandwidth": (
        WHOLE.replace("sms = 10", "memory_fraction = 90"),
        "memory_fraction: 90 stands here; a fra",
    ),
    "no fraction at all": (
        WHOLE.replace("sms = 10", "memory_fraction = 0"),
        "memory_fraction: 0 stands here; a number above 0",
    ),
    "an allocator that saves": (
        WHOLE.replace("sms = 10", "allocator_factor = 0.5"),
        "device.allocator_factor: 0.5 stands here; a number from 1 on",
    ),
    "memory that reaches nothing": (
        WHOLE.replace("sms = 10", "memory_steps = [[10, 0]]"),
        r"memory_steps\[0\]\[1\]: 0 stands here; a number above 0",
    ),
    "unknown generation": (
        WHOLE.replace("sms = 10", 'generation = "fermi"'),
        "device.generation: 'fermi' stands here; one of",
    ),
    "no nodes": ('device = "h100-80g-sxm"\nnodes = []\n', "nodes: none stand here"),
    "nodes of nothing": (
        "[[nodes]]\ncount = 2\n",
        r"nodes\[0\]: device is missing, here or for the whole file",
    ),
    "nodes of an unknown device": (
        MIXED.replace("a100-80g-sxm", "a1"),
        r"nodes\[0\].device: no device 'a1'; known: a100-80g",
    ),
    "nodes with unknown keys": (
        MIXED.replace("latency", "delay"),
        r"nodes\[1\].links.inter.delay: no such key; known here: kind",
    ),
    "nodes with rails": (
        MIXED.replace("latency", "rails"),
        r"nodes\[1\].links.inter.rails: no such key",
    ),
    "nodes of several sizes": (
        MIXED.replace("devices = 4", "devices = 8", 1),
        "4 devices per node of h100-80g-sxm and 8 of a100",
    ),
    "one table for two devices": (
        MIXED + '[communication]\nmessages = "m.csv"\n',
        "messages: a table holds for one kind of device",
    ),
    "one table of kernels for two devices": (
        MIXED + ROW,
        "kernel: a table holds for one kind of device",
    ),
    "devices beside a CPU": (MIXED.replace("h100-80g-sxm", "cpu-local"), "no device 'cpu-local'"),
    "not TOML": ("device = \n", "not TOML"),
    "empty name": (
        'name = " "\ndevice = "h100-80g-sxm"\n',
        "name: ' ' stands here; text is needed",
    ),
}
