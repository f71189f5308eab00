// A program that turns against the node that it was carried to. Once the execution is
// there, it jumps to a `syscall` instruction of the runtime's own text, which no
// dispatch holds back, and asks the node's kernel for what a slice must not have.
//
//   hostile where                says on which side it is, and ends
//   hostile where               says that it got there
//   hostile private MIB         takes so much memory, and holds it
//   hostile huge MIB            the same, as fast as the kernel can give it
//   hostile shared MIB          shared memory, which stays when its pages are let go
//   hostile tables MIB          page tables: one page of each 2 MiB, read and so zero
//   hostile call NUMBER [ARGUMENT...]
//                               one system call, that no slice needs mostly
//   hostile flood SECONDS       says things to its node's daemon, without end
//   hostile deaf SECONDS        computes, and answers nobody
//   hostile damage NUMBER       goes to and fro while the node damages what it sends home
//                               (proc/runtime/src/engine/damage.rs)
//
// It ends with 0 where it got what it wanted; a node should end it before.
#include <elf.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

enum { PAGE = 4096, MIB = 1 << 20, HOLD_SECONDS = 4, ARCH_SET_GS = 0x1001 };

// Where the runtime lies.
static unsigned char *const runtime = (unsigned char *)0x600000000000UL;

static unsigned char *far_call; // syscall; ret

// The runtime's executable segment, by its ELF header, and in it the instruction.
static void find_far_call(void) {
    const Elf64_Ehdr *header = (const Elf64_Ehdr *)runtime;
    const Elf64_Phdr *segment = (const Elf64_Phdr *)(runtime + header->e_phoff);
    for (int i = 0; i < header->e_phnum; i++) {
        if (segment[i].p_type != PT_LOAD || !(segment[i].p_flags & PF_X)) continue;
        unsigned char *text = (unsigned char *)segment[i].p_vaddr;
        for (size_t at = 0; at + 3 <= segment[i].p_memsz; at++)
            if (!memcmp(text + at, "\x0f\x05\xc3", 3)) far_call = text + at;
    }
    if (!far_call) {
        fprintf(stderr, "no way to make a system call was found\n");
        exit(2);
    }
}

static long far(long number, long a, long b, long c, long d, long e, long f) {
    register long r10 __asm__("r10") = d;
    register long r8 __asm__("r8") = e;
    register long r9 __asm__("r9") = f;
    long result;
    // Past the red zone, then a call.
    __asm__ volatile("sub $128, %%rsp; call *%[call]; add $128, %%rsp"
                     : "=a"(result)
                     : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9), [call] "r"(far_call)
                     : "rcx", "r11", "memory");
    return result;
}

static double far_now(void) {
    // Written first, so that its page is here: the kernel asks nobody for it.
    volatile struct timespec now = {0};
    far(SYS_clock_gettime, CLOCK_MONOTONIC, (long)&now, 0, 0, 0, 0);
    return now.tv_sec + now.tv_nsec / 1e9;
}

// What the runtime was told at its start: it knows there on which side it is.
static volatile struct { char magic[8]; uint32_t version, role; } *told;

static void find_told(void) {
    const Elf64_Ehdr *header = (const Elf64_Ehdr *)runtime;
    const Elf64_Phdr *segment = (const Elf64_Phdr *)(runtime + header->e_phoff);
    for (int i = 0; i < header->e_phnum; i++) {
        if (segment[i].p_type != PT_LOAD || !(segment[i].p_flags & PF_W)) continue;
        unsigned char *data = (unsigned char *)segment[i].p_vaddr;
        for (size_t at = 0; at + 16 <= segment[i].p_memsz; at += 8)
            if (!memcmp(data + at, "weftboot", 8)) told = (void *)(data + at);
    }
    if (!told) {
        fprintf(stderr, "the runtime was not told anything\n");
        exit(2);
    }
}

// Touches more memory than home may hold until the execution has left.
static void go(void) {
    enum { BYTES = 24 * MIB, ROUNDS = 64, SLICE = 1 };
    volatile unsigned char *memory =
        mmap(0, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    for (int round = 0; round < ROUNDS; round++)
        for (size_t at = 0; at < BYTES; at += PAGE) {
            memory[at]++;
            if (told->role == SLICE) return;
        }
    fprintf(stderr, "the execution stays at home\n");
    exit(2);
}

static void wait_there(double seconds) {
    double end = far_now() + seconds;
    while (far_now() < end) {}
}

static char *far_map(size_t bytes, long protection, long flags) {
    return (char *)far(SYS_mmap, 0, bytes, protection, flags, -1, 0);
}

static void hold(const char *kind, size_t bytes) {
    const long writable = PROT_READ | PROT_WRITE, own = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    if (!strcmp(kind, "tables")) {
        const size_t reach = 2 * MIB, piece = (size_t)512 << 30;
        for (size_t tables = 0; tables < bytes;) {
            volatile char *memory = far_map(piece, PROT_READ, own);
            for (size_t at = 0; at < piece && tables < bytes; at += reach, tables += PAGE) (void)memory[at];
        }
    } else if (!strcmp(kind, "shared")) {
        const size_t piece = 16 * MIB;
        for (size_t taken = 0; taken < bytes; taken += piece) {
            volatile char *memory = far_map(piece, writable, MAP_SHARED | MAP_ANONYMOUS);
            for (size_t at = 0; at < piece; at += PAGE) memory[at] = 1;
            far(SYS_madvise, (long)memory, piece, MADV_DONTNEED, 0, 0, 0);
        }
    } else {
        volatile char *memory = far_map(bytes, writable, own);
        if (!strcmp(kind, "huge")) far(SYS_madvise, (long)memory, bytes, MADV_HUGEPAGE, 0, 0, 0);
        for (size_t at = 0; at < bytes; at += PAGE) memory[at] = 1;
    }
    wait_there(HOLD_SECONDS);
    printf("held %zu MiB (%s)\n", bytes / MIB, kind);
}

// A runtime's last words are a message on its control socket, by their kind; these come
// by the thousand. Of the sockets that the runtime keeps, that one is the first.
static void flood(double seconds) {
    enum { KEPT = 3, KEPT_END = 1 << 16, FATAL = 5, BATCH = 1000 };
    static struct { uint32_t kind, node; uint64_t words[4]; char text[208]; } message = {.kind = FATAL};
    memset(message.text, 'A', sizeof message.text);
    long sent = 0, control = KEPT;
    while (control < KEPT_END && far(SYS_sendto, control, (long)&message, sizeof message, MSG_NOSIGNAL, 0, 0) < 0)
        control++;
    for (double end = far_now() + seconds; far_now() < end;)
        for (int i = 0; i < BATCH; i++)
            sent += far(SYS_sendto, control, (long)&message, sizeof message, MSG_DONTWAIT | MSG_NOSIGNAL, 0, 0) > 0;
    printf("said %ld things\n", sent);
}

// The node sees which damage is asked for by the GS base. What home may not hold is
// touched again and again, so the execution goes there and comes back, by itself and
// for calls that only home can make. Where it is, nobody can tell: the node's runtime is
// another one than home's.
static void wander(long damage) {
    enum { BYTES = 24 * MIB, ROUNDS = 8 };
    volatile unsigned char *memory =
        mmap(0, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    syscall(SYS_arch_prctl, ARCH_SET_GS, damage);
    for (int round = 0; round < ROUNDS; round++)
        for (size_t at = 0; at < BYTES; at += PAGE) {
            memory[at]++;
            if (at % MIB == 0) kill(getpid(), 0);
        }
    for (size_t at = 0; at < BYTES; at += PAGE)
        if (memory[at] != ROUNDS) {
            fprintf(stderr, "page %zu was touched %d times, not %d\n", at / PAGE, memory[at], ROUNDS);
            exit(2);
        }
    printf("was there and back\n");
}

int main(int count, char **words) {
    const char *mode = count > 1 ? words[1] : "where";
    long number = count > 2 ? strtol(words[2], 0, 0) : 0;
    long arguments[6] = {0};
    for (int i = 0; i < 6 && i + 3 < count; i++) arguments[i] = strtol(words[i + 3], 0, 0);
    if (!strcmp(mode, "damage")) {
        wander(number);
        return 0;
    }
    find_far_call();
    find_told();
    go();
    if (!strcmp(mode, "where")) {
        printf("there\n");
    } else if (!strcmp(mode, "call")) {
        long result = far(number, arguments[0], arguments[1], arguments[2], arguments[3], arguments[4], arguments[5]);
        printf("call %ld: %ld\n", number, result);
    } else if (!strcmp(mode, "flood")) {
        flood(number);
    } else if (!strcmp(mode, "deaf")) {
        wait_there(number);
        printf("was away\n");
    } else {
        hold(mode, (size_t)number * MIB);
    }
    return 0;
}
