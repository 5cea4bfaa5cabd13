package main

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"unsafe"
)

// slotFile keeps the state of the latest sequence on disk, as a server does
// that saves its key-value cache. Other processes may read or replace the file;
// an advisory lock on a second file keeps them apart.
type slotFile struct {
	state *os.File
	lock  string
}

func newSlotFile(dir string) (*slotFile, error) {
	file, err := os.Create(filepath.Join(dir, "slot.bin"))
	if err != nil {
		return nil, err
	}
	lock, err := os.Create(filepath.Join(dir, "slot.lock"))
	if err != nil {
		return nil, err
	}
	return &slotFile{state: file, lock: lock.Name()}, lock.Close()
}

// save writes the state under the lock, waiting for it as long as it takes.
func (f *slotFile) save(s *state) (err error) {
	// The lock belongs to the open file: requests that shared one would not
	// keep each other out.
	lock, err := os.OpenFile(f.lock, os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, lock.Close()) }() // closing unlocks
	for {
		err = syscall.Flock(int(lock.Fd()), syscall.LOCK_EX)
		if !errors.Is(err, syscall.EINTR) {
			break
		}
	}
	if err != nil {
		return fmt.Errorf("lock %s: %w", f.lock, err)
	}
	_, err = f.state.WriteAt(unsafe.Slice((*byte)(unsafe.Pointer(s)), len(s)), 0)
	return err
}
