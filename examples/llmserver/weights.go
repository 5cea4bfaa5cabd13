package main

import (
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"os"

	"golang.org/x/sys/unix"
)

// weights is a file of random numbers, mapped into memory.
type weights struct {
	file  *os.File
	pages []byte
}

// openWeights writes a weights file of size MiB, always the same one, and maps
// it read-only. Access to it is declared random, as that to the experts of a
// real mixture is: the kernel then reads single pages, and each page that is
// not in the page cache costs a fault that waits for the disk.
func openWeights(path string, size int) (_ *weights, err error) {
	if size < 1 || size > 64<<10 {
		return nil, fmt.Errorf("-weights-mib %d: must be between 1 and %d", size, 64<<10)
	}
	file, err := os.Create(path)
	if err != nil {
		return nil, err
	}
	defer func() {
		if err != nil {
			file.Close()
		}
	}()
	var fs unix.Statfs_t
	if err := unix.Fstatfs(int(file.Fd()), &fs); err != nil {
		return nil, fmt.Errorf("file system of %s: %w", path, err)
	}
	if fs.Type == unix.TMPFS_MAGIC || fs.Type == unix.RAMFS_MAGIC {
		return nil, fmt.Errorf("%s lies in memory (tmpfs), so its pages can never be missing; choose a -dir on a disk", path)
	}
	random := rand.NewChaCha8([32]byte{})
	if _, err := io.CopyN(file, random, int64(size)<<20); err != nil {
		return nil, fmt.Errorf("write weights: %w", err)
	}
	// Dirty pages cannot leave the page cache.
	if err := file.Sync(); err != nil {
		return nil, fmt.Errorf("write weights: %w", err)
	}
	pages, err := unix.Mmap(int(file.Fd()), 0, size<<20, unix.PROT_READ, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("map weights: %w", err)
	}
	if err := unix.Madvise(pages, unix.MADV_RANDOM); err != nil {
		return nil, errors.Join(fmt.Errorf("map weights: %w", err), unix.Munmap(pages))
	}
	return &weights{file: file, pages: pages}, nil
}

func (w *weights) close() error {
	return errors.Join(unix.Munmap(w.pages), w.file.Close())
}
