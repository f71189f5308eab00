/* The list of tests. */

#include "litmus.h"

static const struct test *const FILES[] = {
	ORDERING_TESTS, WHOLE_TESTS, LOCKED_TESTS, CODE_TESTS, PLANTED_TESTS,
};

const struct test *test_at(int index)
{
	for (size_t file = 0; file < sizeof(FILES) / sizeof(FILES[0]); file++)
		for (const struct test *test = FILES[file]; test->name; test++)
			if (index-- == 0)
				return test;
	return NULL;
}

const struct test *test_named(const char *name)
{
	const struct test *test;

	for (int i = 0; (test = test_at(i)); i++)
		if (!strcmp(test->name, name))
			return test;
	return NULL;
}
