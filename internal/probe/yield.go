//go:build linux

package probe

import (
	"fmt"
	"runtime"

	"golang.org/x/sys/unix"
)

// yieldAfter is how many records are handled between two offers of the CPU: some
// 50 µs of work.
const yieldAfter = 32

// giveWay keeps the calling goroutine to its thread and makes that a batch thread,
// which never takes the CPU from a running one, until the returned function is
// called. Its share of the CPU stays what it was.
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
	attr.Policy = unix.SCHED_BATCH
	if err := unix.SchedSetAttr(0, &attr, 0); err != nil {
		return restore, fmt.Errorf("have the reader of the ring give way to others: %w", err)
	}
	return func() {
		_ = unix.SchedSetAttr(0, before, 0) // what it gave it takes back
		runtime.UnlockOSThread()
	}, nil
}

// offerCPU lets others run that have come to wait for this thread's CPU: a reading
// of the ring takes some hundred microseconds, by which it would hold up the servers
// beside it. It costs the thread its turn, so not where the ring fills up meanwhile.
func (p *Probe) offerCPU() {
	if p.ring.AvailableBytes() < p.ring.BufferSize()/4 {
		_, _, _ = unix.RawSyscall(unix.SYS_SCHED_YIELD, 0, 0, 0) // cannot fail
	}
}
