/* Dijkstra's algorithm on an adjacency matrix of int weights.
 *
 * As in the paper, the matrix is the memory and each of its rows is read once,
 * when its node is settled; distances and marks are arrays of their own, small
 * and hot. Not every node can be reached: those rows are never read. */
#include "elastic.h"

#define UNREACHED UINT32_MAX

struct graph {
	size_t nodes;
	int *weights; /* nodes x nodes; 0 means no edge */
};

static size_t square_root(size_t value)
{
	size_t root = 0;

	while ((root + 1) * (root + 1) <= value)
		root++;
	return root;
}

static struct graph build(const struct bench *bench)
{
	struct graph graph;
	struct random random = random_from(bench->seed);

	graph.nodes = square_root(bench_bytes(bench) / sizeof(int));
	graph.weights = allocate(graph.nodes * graph.nodes * sizeof(int));
	for (size_t from = 0; from < graph.nodes; from++) {
		for (size_t to = 0; to < graph.nodes; to++) {
			uint64_t value = random_next(&random);
			/* One node in eight has no edge that leads to it. */
			int edge = to % 8 != 5 && value % 4 == 0 && from != to;

			graph.weights[from * graph.nodes + to] =
				edge ? (int)(value >> 40 & 0xffff) + 1 : 0;
		}
	}
	return graph;
}

static size_t nearest(const uint32_t *distance, const uint8_t *settled, size_t nodes)
{
	size_t best = nodes;

	for (size_t node = 0; node < nodes; node++) {
		if (!settled[node] && distance[node] != UNREACHED &&
		    (best == nodes || distance[node] < distance[best]))
			best = node;
	}
	return best;
}

static void shortest_paths(const struct graph *graph, uint32_t *distance, uint8_t *settled)
{
	for (size_t node = 0; node < graph->nodes; node++) {
		distance[node] = UNREACHED;
		settled[node] = 0;
	}
	distance[0] = 0;
	for (;;) {
		size_t node = nearest(distance, settled, graph->nodes);

		if (node == graph->nodes)
			return;
		settled[node] = 1;
		const int *row = &graph->weights[node * graph->nodes];
		for (size_t to = 0; to < graph->nodes; to++) {
			if (row[to] != 0 && distance[node] + (uint32_t)row[to] < distance[to])
				distance[to] = distance[node] + (uint32_t)row[to];
		}
	}
}

int main(int argc, char **argv)
{
	struct bench bench = bench_start(argc, argv, "dijkstra");
	struct graph graph = build(&bench);
	uint32_t *distance = allocate(graph.nodes * sizeof(uint32_t));
	uint8_t *settled = allocate(graph.nodes);

	bench_measure(&bench);
	shortest_paths(&graph, distance, settled);
	uint64_t checksum = 0;
	for (size_t node = 0; node < graph.nodes; node++)
		checksum = fold(checksum, distance[node]);
	return bench_finish(&bench, checksum);
}
