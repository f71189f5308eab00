/* Mappings of every kind, under pressure. Each step checks itself and prints
 * one line; the program exits with 1 after a wrong byte.
 *
 *     mappings FILE [SIZE_MIB]
 *
 * FILE is created, and is an output: its bytes are part of the result. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

#define PAGE 4096u

static size_t size_bytes;
static int file;

static void check(int right, const char *what)
{
	if (!right) {
		printf("WRONG: %s\n", what);
		exit(1);
	}
}

static void *map(size_t bytes, int protection, int flags, int fd)
{
	void *at = mmap(NULL, bytes, protection, flags, fd, 0);

	if (at == MAP_FAILED) {
		printf("mmap of %zu bytes: %s\n", bytes, strerror(errno));
		exit(1);
	}
	return at;
}

static uint64_t mark(size_t page, uint64_t salt)
{
	return (page + 1) * 0x9e3779b97f4a7c15u ^ salt;
}

static void write_marks(unsigned char *at, size_t bytes, uint64_t salt)
{
	for (size_t page = 0; page < bytes / PAGE; page++)
		*(volatile uint64_t *)(at + page * PAGE + 8 * (page % 512)) = mark(page, salt);
}

static void check_marks(const unsigned char *at, size_t bytes, uint64_t salt, const char *what)
{
	for (size_t page = 0; page < bytes / PAGE; page++) {
		uint64_t seen = *(const volatile uint64_t *)(at + page * PAGE + 8 * (page % 512));

		if (seen != mark(page, salt)) {
			printf("WRONG: %s, page %zu of %zu: %016llx\n", what, page, bytes / PAGE,
			       (unsigned long long)seen);
			exit(1);
		}
	}
}

static void anonymous(void)
{
	unsigned char *at = map(size_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1);

	for (size_t page = 0; page < size_bytes / PAGE; page += 7)
		check(at[page * PAGE + 5] == 0, "untouched memory reads as zero");
	write_marks(at, size_bytes, 1);
	check_marks(at, size_bytes, 1, "anonymous");
	/* A hole in the middle, and a new mapping in the hole. */
	size_t third = size_bytes / 3 / PAGE * PAGE;
	check(munmap(at + third, third) == 0, "munmap");
	unsigned char *hole = mmap(at + third, third, PROT_READ | PROT_WRITE,
				   MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED_NOREPLACE, -1, 0);
	check(hole == at + third, "the hole is free");
	for (size_t page = 0; page < third / PAGE; page++)
		check(hole[page * PAGE + 8] == 0, "a new mapping is zero");
	check_marks(at, third, 1, "before the hole");
	check(munmap(at, size_bytes) == 0, "munmap of all");
	printf("anonymous\n");
}

static void remap(void)
{
	size_t bytes = size_bytes / 4 / PAGE * PAGE;
	unsigned char *at = map(bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1);

	write_marks(at, bytes, 2);
	for (int round = 0; round < 3; round++) {
		/* Something right behind it forces the next growth to move. */
		unsigned char *wall = mmap(at + bytes, PAGE, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS |
					   MAP_FIXED_NOREPLACE, -1, 0);
		size_t grown = bytes + bytes / 2 / PAGE * PAGE;
		unsigned char *moved = mremap(at, bytes, grown, MREMAP_MAYMOVE);

		check(moved != MAP_FAILED, "mremap grows");
		check_marks(moved, bytes, 2, "after growing");
		check(moved[grown - 1] == 0, "the new end is zero");
		write_marks(moved, grown, 2);
		if (wall != MAP_FAILED)
			munmap(wall, PAGE);
		at = moved;
		bytes = grown;
	}
	check(mremap(at, bytes, bytes / 2 / PAGE * PAGE, 0) == at, "mremap shrinks in place");
	bytes = bytes / 2 / PAGE * PAGE;
	check_marks(at, bytes, 2, "after shrinking");
	unsigned char *target = map(bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1);
	check(mremap(at, bytes, bytes, MREMAP_MAYMOVE | MREMAP_FIXED, target) == target,
	      "mremap to a fixed place");
	check_marks(target, bytes, 2, "after moving");
	munmap(target, bytes);
	printf("mremap\n");
}

static void protect(void)
{
	size_t bytes = size_bytes / 2 / PAGE * PAGE;
	unsigned char *at = map(bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1);

	write_marks(at, bytes, 3);
	for (int round = 0; round < 4; round++) {
		check(mprotect(at, bytes, PROT_READ) == 0, "mprotect to read");
		check_marks(at, bytes, 3 + (uint64_t)round, "read-only");
		check(mprotect(at, bytes / 2, PROT_NONE) == 0, "mprotect to none");
		check(mprotect(at, bytes, PROT_READ | PROT_WRITE) == 0, "mprotect to write");
		check_marks(at, bytes, 3 + (uint64_t)round, "writable again");
		write_marks(at, bytes, 4 + (uint64_t)round);
	}
	/* Code made at run time. */
	static const unsigned char code[] = { 0xb8, 42, 0, 0, 0, 0xc3 };
	memcpy(at, code, sizeof(code));
	check(mprotect(at, PAGE, PROT_READ | PROT_EXEC) == 0, "mprotect to execute");
	check(((int (*)(void))(uintptr_t)at)() == 42, "generated code runs");
	munmap(at, bytes);
	printf("mprotect\n");
}

static void dontneed(void)
{
	size_t bytes = size_bytes / 2 / PAGE * PAGE;
	unsigned char *at = map(bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1);

	write_marks(at, bytes, 9);
	size_t half = bytes / 2 / PAGE * PAGE;
	check(madvise(at, half, MADV_DONTNEED) == 0, "madvise");
	for (size_t page = 0; page < half / PAGE; page++)
		check(*(uint64_t *)(at + page * PAGE + 8 * (page % 512)) == 0,
		      "memory given up reads as zero");
	write_marks(at, half, 9);
	check_marks(at, half, 9, "written after MADV_DONTNEED");
	for (size_t page = half / PAGE; page < bytes / PAGE; page++)
		check(*(uint64_t *)(at + page * PAGE + 8 * (page % 512)) == mark(page, 9),
		      "the other half is unchanged");
	munmap(at, bytes);
	printf("madvise\n");
}

static void program_break(void)
{
	size_t bytes = size_bytes / 4 / PAGE * PAGE;
	unsigned char *start = sbrk(0);

	for (int round = 0; round < 3; round++) {
		check(sbrk((intptr_t)bytes) == start, "the break grows");
		for (size_t page = 0; page < bytes / PAGE; page++)
			check(start[page * PAGE + PAGE - 1] == 0, "a new break is zero");
		memset(start, 0x55 + round, bytes);
		check(start[bytes - 1] == 0x55 + round, "the break is written");
		check(sbrk(-(intptr_t)bytes) == start + bytes, "the break shrinks");
	}
	printf("brk\n");
}

static void file_private(void)
{
	size_t bytes = size_bytes / 4 / PAGE * PAGE;
	unsigned char *buffer = malloc(bytes);

	write_marks(memset(buffer, 0x11, bytes), bytes, 5);
	check(pwrite(file, buffer, bytes, 0) == (ssize_t)bytes, "pwrite");
	unsigned char *readonly = map(bytes, PROT_READ, MAP_PRIVATE, file);
	check(memcmp(readonly, buffer, bytes) == 0, "private, read-only");
	unsigned char *writable = map(bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE, file);
	write_marks(writable, bytes, 6);
	check_marks(writable, bytes, 6, "private, writable");
	check_marks(readonly, bytes, 5, "the other private mapping");
	memset(buffer, 0, bytes);
	check(pread(file, buffer, bytes, 0) == (ssize_t)bytes, "pread");
	check_marks(buffer, bytes, 5, "the file is unchanged");
	/* Read only first, writable later. */
	check(mprotect(readonly, bytes, PROT_READ | PROT_WRITE) == 0, "mprotect of a file");
	write_marks(readonly, bytes, 7);
	check_marks(readonly, bytes, 7, "written after mprotect");
	munmap(readonly, bytes);
	munmap(writable, bytes);
	free(buffer);
	printf("private file\n");
}

static void file_shared(void)
{
	size_t bytes = size_bytes / 8 / PAGE * PAGE;
	unsigned char *at = map(bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file);
	unsigned char *again = map(bytes, PROT_READ, MAP_SHARED, file);
	uint64_t seen;

	write_marks(at, bytes, 8);
	check_marks(again, bytes, 8, "the second shared mapping");
	check(pread(file, &seen, sizeof(seen), 0) == sizeof(seen) && seen == mark(0, 8),
	      "the file has what was written through the mapping");
	seen = 1234;
	check(pwrite(file, &seen, sizeof(seen), 0) == sizeof(seen), "pwrite");
	check(*(volatile uint64_t *)at == 1234, "the mapping has what was written to the file");
	check(msync(at, bytes, MS_SYNC) == 0, "msync");
	munmap(at, bytes);
	munmap(again, bytes);
	printf("shared file\n");
}

static void sparse(void)
{
	size_t bytes = (size_t)64 << 30;
	unsigned char *at = map(bytes, PROT_READ | PROT_WRITE,
				MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1);
	size_t step = bytes / 500 / PAGE * PAGE;

	for (size_t i = 0; i < 500; i++)
		*(uint64_t *)(at + i * step) = mark(i, 10);
	for (size_t i = 0; i < 500; i++) {
		check(*(uint64_t *)(at + i * step) == mark(i, 10), "sparse");
		check(at[i * step + step / 2] == 0, "between");
	}
	munmap(at, bytes);
	printf("sparse\n");
}

/* System calls whose buffers are in memory that may be elsewhere, unaligned,
 * scattered, or not readable at all. */
static void buffers(void)
{
	size_t bytes = size_bytes / 4 / PAGE * PAGE;
	unsigned char *at = map(bytes + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1);
	struct iovec parts[8];

	write_marks(at, bytes, 11);
	size_t total = 0;
	for (size_t i = 0; i < 8; i++) {
		parts[i] = (struct iovec){ at + (7 - i) * (bytes / 8) + 13, 5000 };
		total += parts[i].iov_len;
	}
	off_t end = (off_t)size_bytes;
	check(pwritev(file, parts, 8, end) == (ssize_t)total, "pwritev");
	unsigned char *back = malloc(total);
	check(pread(file, back, total, end) == (ssize_t)total, "pread");
	for (size_t i = 0; i < 8; i++)
		check(memcmp(back + i * 5000, parts[i].iov_base, 5000) == 0, "scattered");
	free(back);
	check(mprotect(at + bytes, PAGE, PROT_NONE) == 0, "a wall");
	errno = 0;
	check(pwrite(file, at + bytes, 16, end) == -1 && errno == EFAULT, "EFAULT for memory behind the wall");
	errno = 0;
	volatile uintptr_t nowhere = 16;
	check(read(file, (void *)nowhere, 16) == -1 && errno == EFAULT, "EFAULT for no memory");
	munmap(at, bytes + PAGE);
	printf("buffers\n");
}

static uint64_t recurse(unsigned depth, uint64_t value)
{
	volatile uint64_t frame[64];

	for (unsigned i = 0; i < 64; i++)
		frame[i] = value + i;
	uint64_t below = depth == 0 ? 0 : recurse(depth - 1, value * 31 + 7);
	for (unsigned i = 0; i < 64; i++)
		check(frame[i] == value + i, "the stack keeps its words");
	return below * 3 + frame[depth % 64];
}

int main(int argc, char **argv)
{
	if (argc < 2) {
		fprintf(stderr, "usage: mappings FILE [SIZE_MIB]\n");
		return 2;
	}
	size_bytes = (size_t)(argc > 2 ? atol(argv[2]) : 16) << 20;
	file = open(argv[1], O_RDWR | O_CREAT | O_TRUNC, 0600);
	if (file < 0) {
		perror(argv[1]);
		return 2;
	}
	setvbuf(stdout, NULL, _IOLBF, 0);
	anonymous();
	remap();
	protect();
	dontneed();
	program_break();
	file_private();
	file_shared();
	sparse();
	buffers();
	printf("stack %016llx\n", (unsigned long long)recurse(10000, 1));
	return 0;
}
