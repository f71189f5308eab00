/* Checks what the boot loader gave, says so on COM1, and leaves. */

#include <stdint.h>

enum { COM1 = 0x3f8, DEBUG_EXIT = 0xf4, GOOD = 0x10, BAD = 0x11, LINE_READY = 0x20 };

static void out8(uint16_t port, uint8_t value)
{
	__asm__ volatile("outb %0, %1" : : "a"(value), "Nd"(port));
}

static uint8_t in8(uint16_t port)
{
	uint8_t value;
	__asm__ volatile("inb %1, %0" : "=a"(value) : "Nd"(port));
	return value;
}

static void put(char letter)
{
	while (!(in8(COM1 + 5) & LINE_READY))
		;
	out8(COM1, letter);
}

static void print(const char *text)
{
	while (*text)
		put(*text++);
}

static void print_number(uint32_t number)
{
	char digits[11];
	char *first = digits + 10;
	*first = 0;
	do
		*--first = '0' + number % 10;
	while (number /= 10);
	print(first);
}

static void leave(uint8_t code)
{
	out8(DEBUG_EXIT, code);
	/* Nobody at that port: stand still. */
	for (;;)
		__asm__ volatile("cli; hlt");
}

static void check(int good, const char *what)
{
	if (good)
		return;
	print("weft-guest: wrong: ");
	print(what);
	print("\n");
	leave(BAD);
}

static uint32_t control_register(void)
{
	uint32_t cr0;
	__asm__ volatile("mov %%cr0, %0" : "=r"(cr0));
	return cr0;
}

static uint32_t flags(void)
{
	uint32_t value;
	__asm__ volatile("pushf; pop %0" : "=r"(value));
	return value;
}

/* Zero unless the loader cleared it, which it must. */
static volatile uint8_t cleared[8192];

static void say(const char *protocol, const char *command_line, uint64_t usable,
		const uint8_t *module, const uint8_t *module_end)
{
	check((control_register() & 0x80000001) == 1, "protected mode without paging");
	check(!(flags() & 0x200), "interrupts are off");
	for (unsigned at = 0; at < sizeof cleared; at++)
		check(cleared[at] == 0, "memory after the image is clear");
	print("weft-guest: ");
	print(protocol);
	print(" hello\nweft-guest: command line: ");
	print(command_line);
	print("\nweft-guest: usable KiB: ");
	print_number((uint32_t)(usable >> 10));
	print("\nweft-guest: module: ");
	while (module < module_end)
		put(*module++);
	print("\n");
	leave(GOOD);
}

void multiboot_main(uint32_t magic, const uint32_t *information)
{
	check(magic == 0x2badb002, "magic in EAX");
	check(information[0] & 1 << 6, "there is a memory map");
	check(information[0] & 1 << 2, "there is a command line");
	uint64_t usable = 0;
	uint32_t line = information[12];
	while (line < information[12] + information[11]) {
		const uint32_t *words = (const uint32_t *)line;
		if (words[5] == 1)
			usable += words[3] | (uint64_t)words[4] << 32;
		line += words[0] + 4;
	}
	check(usable > 1 << 20, "memory to use");
	const uint8_t *module = 0, *module_end = 0;
	if (information[0] & 1 << 3 && information[5]) {
		const uint32_t *first = (const uint32_t *)information[6];
		module = (const uint8_t *)first[0];
		module_end = (const uint8_t *)first[1];
	}
	say("multiboot", (const char *)information[4], usable, module, module_end);
}

struct start_info {
	uint32_t magic, version, flags, module_count;
	uint64_t modules, command_line, rsdp, memory_map;
	uint32_t memory_map_entries, reserved;
};

struct module {
	uint64_t address, size, command_line, reserved;
};

struct memory_range {
	uint64_t address, size;
	uint32_t kind, reserved;
};

void pvh_main(const struct start_info *information)
{
	check(information->magic == 0x336ec578, "magic of the start information");
	check(information->version >= 1, "version of the start information");
	const struct memory_range *range = (const void *)(uint32_t)information->memory_map;
	uint64_t usable = 0;
	for (uint32_t at = 0; at < information->memory_map_entries; at++)
		if (range[at].kind == 1)
			usable += range[at].size;
	check(usable > 1 << 20, "memory to use");
	const uint8_t *module = 0, *module_end = 0;
	if (information->module_count) {
		const struct module *first = (const void *)(uint32_t)information->modules;
		module = (const uint8_t *)(uint32_t)first->address;
		module_end = module + (uint32_t)first->size;
	}
	say("pvh", (const char *)(uint32_t)information->command_line, usable, module, module_end);
}
