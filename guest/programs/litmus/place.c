/*
 * Where the variables of a batch's rounds are: in cells of a line each, y
 * half a line behind x. Between nodes that share memory page by page, it
 * decides which rounds wait for a page, and whether they do so before, between
 * or after their accesses.
 */

#include "litmus.h"

#include "access.h"

enum {
	CELLS = PAGE / LINE,
	AREA_PAGES = BATCH_MAX / CELLS,
	/* What rounds in turn are spread over, where a batch is small. */
	STRIDE_MIN = 4,
	HALF_LINE = LINE / 2,
	/* Pages that a thread touches before a batch, of each area. */
	TOUCHED_MAX = 4,
};

_Static_assert(AREA_PAGES >= STRIDE_MIN, "an area has all pages of a stride");

static unsigned char *area, *second_area;

void prepare_places(void)
{
	area = pages(AREA_PAGES * PAGE, MAP_SHARED);
	second_area = pages(AREA_PAGES * PAGE, MAP_SHARED);
}

/* Pages of an area that a batch uses. */
static int pages_used(const struct batch *batch)
{
	int filled = (batch->size + CELLS - 1) / CELLS;

	return batch->layout == STRIDED && filled < STRIDE_MIN ? STRIDE_MIN : filled;
}

static unsigned char *cell(unsigned char *from, int page, int line)
{
	return from + page * PAGE + line * LINE;
}

struct round round_at(const struct batch *batch, int index)
{
	unsigned char *x, *y;
	int stride = pages_used(batch);

	switch (batch->layout) {
	case TOGETHER:
		x = cell(area, index / CELLS, index % CELLS);
		y = x;
		break;
	case APART:
		x = cell(area, index / CELLS, index % CELLS);
		y = cell(second_area, index / CELLS, index % CELLS);
		break;
	default:
		x = cell(area, index % stride, index / stride);
		y = cell(area, (index + 1) % stride, index / stride);
	}
	return (struct round){
		.x = (volatile uint32_t *)x,
		.y = (volatile uint32_t *)(y + HALF_LINE),
		.index = index,
		.batch_size = batch->size,
		.number = batch->first + index,
	};
}

void clear_variables(const struct batch *batch)
{
	for (int i = 0; i < batch->size; i++) {
		struct round round = round_at(batch, i);

		memset((void *)round.x, 0, 16);
		memset((void *)round.y, 0, 16);
	}
}

/* Leaves the word at zero, and its page read, written or alone. */
static void touch(unsigned char *page, uint32_t choice)
{
	if (choice % 4 == 0)
		store((volatile uint32_t *)page, 0);
	else if (choice % 4 == 1)
		load((volatile uint32_t *)page);
}

void touch_variables(const struct batch *batch, uint32_t random)
{
	int touched = pages_used(batch);

	if (touched > TOUCHED_MAX)
		touched = TOUCHED_MAX;
	for (int page = 0; page < touched; page++) {
		touch(cell(area, page, 0), random >> 4 * page);
		if (batch->layout == APART)
			touch(cell(second_area, page, 0), random >> (4 * page + 2));
	}
}
