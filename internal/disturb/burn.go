// Package disturb does to a process what happens to servers: their files leave the
// page cache, others take their CPU.
package disturb

import (
	"errors"
	"fmt"
	"runtime"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// PrepareBurners makes threads on a CPU that are ready to keep it busy, with
// real-time priority where that is allowed, else with the highest ordinary one
// and so many of them that hardly any of the CPU is left. The returned function
// has them do it for a while, once; then they end.
func PrepareBurners(cpu int) (burn func(time.Duration) error) {
	const threads = 8
	// They run Go code, of which only so much runs at once: the rest of this
	// program must not have to wait for them.
	if enough := threads + runtime.NumCPU(); runtime.GOMAXPROCS(0) < enough {
		runtime.GOMAXPROCS(enough)
	}
	ends := make(chan time.Time, threads)
	done := make(chan error, threads)
	asleep := make(chan struct{})
	for range threads {
		go func() {
			// Never unlocked, so that the thread with its changed priority
			// ends with the goroutine.
			runtime.LockOSThread()
			var set unix.CPUSet
			set.Set(cpu)
			err := unix.SchedSetAttr(0, &unix.SchedAttr{Size: unix.SizeofSchedAttr, Policy: unix.SCHED_FIFO, Priority: 1}, 0)
			if err != nil { // a cgroup without a budget for it
				err = unix.Setpriority(unix.PRIO_PROCESS, 0, -20)
			}
			if err == nil {
				err = unix.SchedSetaffinity(0, &set)
			}
			for end := <-ends; time.Now().Before(end); {
			}
			done <- err
			// Gives the CPU up by falling asleep: the last switch of a
			// thread, as it dies, is hidden in some sandboxes.
			<-asleep
		}()
	}
	var once sync.Once
	return func(d time.Duration) (err error) {
		once.Do(func() {
			end := time.Now().Add(d)
			for range threads {
				ends <- end
			}
			for range threads {
				err = errors.Join(err, <-done)
			}
			time.AfterFunc(100*time.Millisecond, func() { close(asleep) })
		})
		if err != nil {
			err = fmt.Errorf("keep CPU %d busy: %w", cpu, err)
		}
		return err
	}
}
