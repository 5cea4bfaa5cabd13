//go:build linux

package probe

import (
	"fmt"
	"runtime"
	"time"

	"golang.org/x/sys/unix"
)

// readerSlice is the longest that the scheduler takes: the deadline that a thread
// is given lies that far ahead.
const readerSlice = 100 * time.Millisecond

// giveWay keeps the calling goroutine to its thread and makes that one yield to
// whoever wakes up, until the returned function is called. A batch thread never
// takes the CPU from a running one (any kernel); one with a long slice loses it
// to one with a shorter (since Linux 6.12, before which it is ignored). Its share
// of the CPU stays what it was, so that the ring is read under load as well.
//
// Without this, each reading of the ring would hold up the servers that share
// the reader's CPU for as long as it takes, which is some hundred microseconds.
func giveWay() (restore func(), err error) {
	runtime.LockOSThread()
	restore = runtime.UnlockOSThread
	before, err := unix.SchedGetAttr(0, 0)
	if err != nil {
		return restore, fmt.Errorf("read how the reader of the ring is scheduled: %w", err)
	}
	if before.Policy != unix.SCHED_NORMAL {
		return restore, nil // somebody has decided already
	}
	attr := *before
	attr.Policy, attr.Runtime = unix.SCHED_BATCH, uint64(readerSlice)
	if err := unix.SchedSetAttr(0, &attr, 0); err != nil {
		return restore, fmt.Errorf("have the reader of the ring give way to others: %w", err)
	}
	return func() {
		_ = unix.SchedSetAttr(0, before, 0) // what it gave it takes back
		runtime.UnlockOSThread()
	}, nil
}
