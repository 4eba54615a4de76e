"""Which batch sizes are captured; what a capture does is for test_gpu_engine.py."""

import pytest

from nanovllm.engine.cuda_graph import CudaGraphs, graph_sizes


@pytest.mark.parametrize("largest", [1, 2, 3, 7, 8, 12, 15, 16, 17, 20, 100, 256, 257, 300, 500, 512, 1024])
def test_every_batch_has_a_captured_size_and_little_padding(largest):
    """Sizes that stopped short of the largest batch once left it without a graph."""
    sizes = graph_sizes(largest)
    assert sizes == sorted(set(sizes)) and sizes[0] == 1 and sizes[-1] == largest
    graphs = CudaGraphs.__new__(CudaGraphs)
    graphs.sizes = sizes
    for num_rows in range(1, largest + 1):
        padded = graphs.padded_size(num_rows)
        assert padded in sizes and num_rows <= padded <= max(2 * num_rows - 1, num_rows + 15, int(num_rows * 1.125))
