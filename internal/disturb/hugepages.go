package disturb

import (
	"bufio"
	"errors"
	"fmt"
	"os"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"
)

// hugePage is the size of a huge page, in bytes: order 9 of the kernel's free blocks.
const hugePage, hugeOrder = 2 << 20, 9

// HugePages holds free huge pages, so that whoever wants one finds memory in pieces
// only, and has to have it compacted first.
type HugePages struct {
	least uint64 // bytes that must remain available to others
	held  [][]byte
}

// NewHugePages holds none yet. It takes none when less than so many bytes remain available.
func NewHugePages(least uint64) *HugePages { return &HugePages{least: least} }

// Fill takes those that are free just now, but for a few.
func (h *HugePages) Fill() error {
	const few = 4
	for {
		free, err := freeHugePages()
		if err != nil || free <= few {
			return err
		}
		available, err := availableMemory()
		if err != nil {
			return err
		}
		n := min(free-few, 256)
		if available < h.least+uint64(n)*hugePage {
			return fmt.Errorf("%d huge pages are free, and only %d MB of memory are available: more is not taken", free, available>>20)
		}
		if err := h.take(n); err != nil {
			return err
		}
	}
}

func (h *HugePages) take(n int) error {
	memory, err := unix.Mmap(-1, 0, (n+1)*hugePage, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_PRIVATE|unix.MAP_ANONYMOUS)
	if err != nil {
		return fmt.Errorf("map %d huge pages: %w", n, err)
	}
	h.held = append(h.held, memory)
	if err := unix.Madvise(memory, unix.MADV_HUGEPAGE); err != nil {
		return fmt.Errorf("madvise for huge pages: %w", err)
	}
	for i := range n {
		memory[(i+1)*hugePage-1] = 1 // somewhere in each, wherever they begin
	}
	return nil
}

// Close gives them back.
func (h *HugePages) Close() error {
	var errs []error
	for _, memory := range h.held {
		errs = append(errs, unix.Munmap(memory))
	}
	h.held = nil
	return errors.Join(errs...)
}

// freeHugePages counts the free blocks of memory that are large enough, in huge pages.
func freeHugePages() (n int, err error) {
	text, err := os.ReadFile("/proc/buddyinfo")
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(text)) { // Node 0, zone Normal, and blocks by order
		fields := strings.Fields(line)
		for order := hugeOrder; order+4 < len(fields); order++ {
			blocks, err := strconv.Atoi(fields[order+4])
			if err != nil {
				return 0, fmt.Errorf("/proc/buddyinfo: %q: %w", line, err)
			}
			n += blocks << (order - hugeOrder)
		}
	}
	return n, nil
}

// availableMemory is what others can have without swapping, in bytes.
func availableMemory() (uint64, error) {
	file, err := os.Open("/proc/meminfo")
	if err != nil {
		return 0, err
	}
	defer file.Close()
	lines := bufio.NewScanner(file)
	for lines.Scan() {
		var kib uint64
		if _, err := fmt.Sscanf(lines.Text(), "MemAvailable: %d kB", &kib); err == nil {
			return kib << 10, nil
		}
	}
	return 0, errors.Join(errors.New("/proc/meminfo has no MemAvailable"), lines.Err())
}
