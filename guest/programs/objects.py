#!/usr/bin/env python3
"""A second or two of what interpreters do: calls, objects, dictionaries, strings, floats."""


class Point:
    def __init__(self, x, y):
        self.x, self.y = x, y

    def moved(self, dx, dy):
        return Point(self.x + dx, self.y + dy)


def fibonacci(n):
    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)


def objects(count):
    point = Point(0.0, 1.0)
    for i in range(count):
        point = point.moved(i * 0.5, -0.25)
    return point.x + point.y


def words(count):
    seen = {}
    for i in range(count):
        word = "w" + str(i * 7919 % 5003)
        seen[word] = seen.get(word, 0) + len(word)
    return sum(seen.values())


def primes(limit):
    sieve = bytearray([1]) * limit
    for i in range(2, limit):
        if sieve[i]:
            sieve[i * i :: i] = bytes(len(range(i * i, limit, i)))
    return sum(sieve) - 2


def main():
    print(fibonacci(22), objects(100_000), words(100_000), primes(200_000))


if __name__ == "__main__":
    main()
