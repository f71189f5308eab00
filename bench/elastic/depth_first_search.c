/* Depth-first search of a graph in memory.
 *
 * The graph is a tree of BRANCHES branches, each a chain, whose nodes are
 * spread over one array: branch after branch, but within a branch the chain
 * visits its nodes in runs of RUN_NODES that are shuffled, so that the search
 * does not follow the layout. A few extra edges lead to nodes elsewhere, which
 * the search has to look at and, mostly, finds visited. Sixteen bytes hold a
 * node's first child and next sibling; the marks are an array of their own, and
 * the search keeps an explicit stack, as deep as the graph. */
#include "elastic.h"

#define NONE UINT32_MAX
#define BRANCH_NODES 65536u
#define RUN_NODES 64u

struct node {
	uint32_t child;
	uint32_t sibling;
	uint32_t other;
	uint32_t value;
};

struct graph {
	uint32_t count;
	uint32_t branches;
	struct node *nodes;
	uint8_t *visited;
	uint32_t *stack;
};

/* The runs of one branch, in the order in which its chain visits them. */
static uint32_t shuffle_runs(uint32_t *runs, uint32_t nodes, struct random *random)
{
	uint32_t count = (nodes + RUN_NODES - 1) / RUN_NODES;

	for (uint32_t i = 0; i < count; i++)
		runs[i] = i;
	/* The first run holds the head of the branch and stays in place. */
	for (uint32_t i = count; i-- > 2;) {
		uint32_t j = 1 + (uint32_t)(random_next(random) % i);
		uint32_t swap = runs[i];

		runs[i] = runs[j];
		runs[j] = swap;
	}
	return count;
}

static void build_branch(struct graph *graph, uint32_t first, uint32_t nodes,
			 struct random *random)
{
	uint32_t runs[BRANCH_NODES / RUN_NODES];
	uint32_t run_count = shuffle_runs(runs, nodes, random);
	uint32_t previous = NONE;

	for (uint32_t r = 0; r < run_count; r++) {
		uint32_t start = runs[r] * RUN_NODES;

		for (uint32_t i = start; i < nodes && i < start + RUN_NODES; i++) {
			uint32_t index = first + i;

			graph->nodes[index] = (struct node){
				.child = NONE,
				.sibling = NONE,
				.other = random_next(random) % 256 == 0 ?
					 (uint32_t)(random_next(random) % graph->count) : NONE,
				.value = (uint32_t)random_next(random),
			};
			if (previous != NONE)
				graph->nodes[previous].child = index;
			previous = index;
		}
	}
}

static struct graph build(const struct bench *bench)
{
	struct graph graph;
	struct random random = random_from(bench->seed);
	size_t bytes_each = sizeof(struct node) + sizeof(uint8_t) + sizeof(uint32_t);
	size_t count = bench_bytes(bench) / bytes_each;

	graph.count = count < NONE ? (uint32_t)count : NONE - 1;
	graph.branches = (graph.count + BRANCH_NODES - 1) / BRANCH_NODES;
	graph.nodes = allocate(graph.count * sizeof(struct node));
	graph.visited = allocate(graph.count);
	graph.stack = allocate(graph.count * sizeof(uint32_t));
	memset(graph.visited, 0, graph.count);
	memset(graph.stack, 0, graph.count * sizeof(uint32_t));

	for (uint32_t branch = 0; branch < graph.branches; branch++) {
		uint32_t first = branch * BRANCH_NODES;
		uint32_t left = graph.count - first;

		build_branch(&graph, first, left < BRANCH_NODES ? left : BRANCH_NODES, &random);
		if (branch > 0)
			graph.nodes[first - BRANCH_NODES].sibling = first;
	}
	return graph;
}

static uint64_t search(struct graph *graph)
{
	uint64_t checksum = 0;
	uint32_t depth = 0;

	graph->stack[depth++] = 0;
	graph->visited[0] = 1;
	while (depth > 0) {
		const struct node *node = &graph->nodes[graph->stack[depth - 1]];
		const uint32_t next[3] = { node->child, node->other, node->sibling };
		int descended = 0;

		for (int i = 0; i < 3 && !descended; i++) {
			if (next[i] == NONE || graph->visited[next[i]])
				continue;
			graph->visited[next[i]] = 1;
			graph->stack[depth++] = next[i];
			descended = 1;
		}
		if (!descended) {
			checksum = fold(checksum, node->value);
			depth--;
		}
	}
	return checksum;
}

int main(int argc, char **argv)
{
	struct bench bench = bench_start(argc, argv, "depth_first_search");
	struct graph graph = build(&bench);

	bench_measure(&bench);
	return bench_finish(&bench, search(&graph));
}
