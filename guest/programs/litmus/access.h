/* Single instructions, so that the compiler neither joins nor moves them. */

#ifndef ACCESS_H
#define ACCESS_H

#include <stdint.h>

static inline void store(volatile uint32_t *to, uint32_t value)
{
	__asm__ volatile("movl %1, %0" : "=m"(*to) : "r"(value) : "memory");
}

static inline uint32_t load(const volatile uint32_t *from)
{
	uint32_t value;

	__asm__ volatile("movl %1, %0" : "=r"(value) : "m"(*from) : "memory");
	return value;
}

static inline void fence(void)
{
	__asm__ volatile("mfence" ::: "memory");
}

static inline uint32_t exchange(volatile uint32_t *with, uint32_t value)
{
	__asm__ volatile("xchgl %0, %1" : "+r"(value), "+m"(*with) :: "memory");
	return value;
}

#endif
