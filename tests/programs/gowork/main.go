// Exercises a static Go program: goroutines and channels, maps, sorting, a
// garbage collector that runs, signals of the runtime's own (preemption), and
// sha256 over memory of a given size.
//
//	gowork [SIZE_MIB]
package main

import (
	"crypto/sha256"
	"encoding/binary"
	"fmt"
	"os"
	"runtime"
	"sort"
	"strconv"
	"sync"
)

type result struct {
	part int
	sum  [32]byte
}

func fill(block []byte, seed uint64) {
	state := seed*0x9e3779b97f4a7c15 + 1
	for i := 0; i+8 <= len(block); i += 8 {
		state ^= state >> 12
		state ^= state << 25
		state ^= state >> 27
		binary.LittleEndian.PutUint64(block[i:], state*0x2545f4914f6cdd1d)
	}
}

func hashAll(blocks [][]byte) []result {
	work := make(chan int)
	results := make(chan result, len(blocks))
	var workers sync.WaitGroup
	for w := 0; w < 4; w++ {
		workers.Add(1)
		go func() {
			defer workers.Done()
			for part := range work {
				results <- result{part, sha256.Sum256(blocks[part])}
			}
		}()
	}
	for part := range blocks {
		work <- part
	}
	close(work)
	workers.Wait()
	close(results)
	var all []result
	for r := range results {
		all = append(all, r)
	}
	sort.Slice(all, func(i, j int) bool { return all[i].part < all[j].part })
	return all
}

func countWords(blocks [][]byte) (int, uint64) {
	words := make(map[uint32]int)
	for _, block := range blocks {
		for i := 0; i+4 <= len(block); i += 64 {
			words[binary.LittleEndian.Uint32(block[i:])>>14]++
		}
	}
	keys := make([]int, 0, len(words))
	for key := range words {
		keys = append(keys, int(key))
	}
	sort.Ints(keys)
	var checksum uint64
	for _, key := range keys {
		checksum = checksum*31 + uint64(key)*uint64(words[uint32(key)])
	}
	return len(keys), checksum
}

func main() {
	sizeMiB := 32
	if len(os.Args) > 1 {
		parsed, err := strconv.Atoi(os.Args[1])
		if err != nil || parsed <= 0 {
			fmt.Fprintln(os.Stderr, "usage: gowork [SIZE_MIB]")
			os.Exit(2)
		}
		sizeMiB = parsed
	}
	blocks := make([][]byte, sizeMiB)
	for i := range blocks {
		blocks[i] = make([]byte, 1<<20)
		fill(blocks[i], uint64(i+1))
	}
	for _, r := range hashAll(blocks) {
		fmt.Printf("%d %x\n", r.part, r.sum)
	}
	runtime.GC()
	count, checksum := countWords(blocks)
	fmt.Printf("%d words, %d\n", count, checksum)
	defer func() {
		fmt.Println("recovered:", recover())
	}()
	var missing *result
	fmt.Println(missing.part)
}
