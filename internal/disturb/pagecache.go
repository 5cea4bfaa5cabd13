package disturb

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Evict drops a file that no process has mapped from the page cache. Its dirty
// pages are written first: they would stay.
func Evict(path string) error {
	file, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer file.Close()
	if err := file.Sync(); err != nil {
		return fmt.Errorf("sync %s: %w", path, err)
	}
	if err := unix.Fadvise(int(file.Fd()), 0, 0, unix.FADV_DONTNEED); err != nil {
		return fmt.Errorf("fadvise %s: %w", path, err)
	}
	return nil
}

// EvictMapping drops a file that a process has mapped from the page cache, until hardly
// any of it is left there.
func EvictMapping(pid int, path string) error {
	file, err := os.Open(path)
	if err != nil {
		return err
	}
	defer file.Close()
	// Pages that the kernel is just looking at stay: ask again.
	var left float64
	for range 5 {
		if err := EvictMappingOnce(pid, path); err != nil {
			return err
		}
		if left, err = Resident(file); err != nil {
			return err
		}
		if left < 0.05 {
			return nil
		}
	}
	return fmt.Errorf("%.0f %% of it stay in memory; does another process use it?", left*100)
}

// EvictMappingOnce drops what can be dropped of the file just now: first out of the
// process, as reclaim would do it, then out of the cache.
func EvictMappingOnce(pid int, path string) error {
	path, err := filepath.EvalSymlinks(path)
	if err != nil {
		return err
	}
	ranges, err := mappings(pid, path)
	if err != nil {
		return err
	}
	if len(ranges) == 0 {
		return fmt.Errorf("process %d does not map it", pid)
	}
	process, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return err
	}
	defer unix.Close(process)
	file, err := os.Open(path)
	if err != nil {
		return err
	}
	defer file.Close()
	for _, r := range ranges {
		if err := pageOut(process, r); err != nil {
			return err
		}
	}
	return unix.Fadvise(int(file.Fd()), 0, 0, unix.FADV_DONTNEED)
}

// mapping is a range of addresses in a process.
type mapping struct{ start, end uint64 }

// mappings finds where a process has mapped a file.
func mappings(pid int, path string) ([]mapping, error) {
	maps, err := os.ReadFile(fmt.Sprintf("/proc/%d/maps", pid))
	if err != nil {
		return nil, err
	}
	var found []mapping
	for line := range bytes.Lines(maps) {
		if !strings.HasSuffix(string(bytes.TrimSpace(line)), " "+path) {
			continue
		}
		var m mapping
		if _, err := fmt.Sscanf(string(line), "%x-%x", &m.start, &m.end); err != nil {
			return nil, fmt.Errorf("/proc/%d/maps: %w", pid, err)
		}
		found = append(found, m)
	}
	return found, nil
}

// pageOut asks the kernel to reclaim a range of another process's memory.
func pageOut(pidfd int, m mapping) error {
	for m.start < m.end {
		vector := struct{ base, length uint64 }{m.start, m.end - m.start}
		n, _, errno := unix.Syscall6(unix.SYS_PROCESS_MADVISE, uintptr(pidfd),
			uintptr(unsafe.Pointer(&vector)), 1, unix.MADV_PAGEOUT, 0, 0)
		if errno != 0 {
			return fmt.Errorf("process_madvise: %w", errno)
		}
		if n == 0 {
			return nil
		}
		m.start += uint64(n)
	}
	return nil
}

// Resident returns the part of a file that is in the page cache, from 0 to 1.
func Resident(file *os.File) (float64, error) {
	info, err := file.Stat()
	if err != nil {
		return 0, err
	}
	data, err := unix.Mmap(int(file.Fd()), 0, int(info.Size()), unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		return 0, err
	}
	defer unix.Munmap(data)
	pages := make([]byte, (len(data)+os.Getpagesize()-1)/os.Getpagesize())
	if _, _, errno := unix.Syscall(unix.SYS_MINCORE, uintptr(unsafe.Pointer(&data[0])), uintptr(len(data)), uintptr(unsafe.Pointer(&pages[0]))); errno != 0 {
		return 0, fmt.Errorf("mincore: %w", errno)
	}
	in := 0
	for _, page := range pages {
		in += int(page & 1)
	}
	return float64(in) / float64(len(pages)), nil
}

// Warm reads a file into the page cache.
func Warm(path string) error {
	file, err := os.Open(path)
	if err != nil {
		return err
	}
	defer file.Close()
	_, err = io.CopyBuffer(struct{ io.Writer }{io.Discard}, struct{ io.Reader }{file}, make([]byte, 1<<20))
	return err
}
