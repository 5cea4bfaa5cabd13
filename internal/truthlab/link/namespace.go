//go:build linux

package link

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"

	"golang.org/x/sys/unix"
)

// namespace is a network namespace that lives as long as its descriptor, or as
// a process in it.
type namespace struct{ file *os.File }

const ownNamespace = "/proc/thread-self/ns/net"

func newNamespace() (*namespace, error) {
	var ns namespace
	err := onThread(func() (err error) {
		if err := unix.Unshare(unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("making a network namespace (needs root): %w", err)
		}
		ns.file, err = os.Open(ownNamespace)
		return err
	})
	return &ns, err
}

// inode is the number by which the kernel names the namespace.
func (ns *namespace) inode() (uint32, error) {
	var st unix.Stat_t
	if err := unix.Fstat(int(ns.file.Fd()), &st); err != nil {
		return 0, fmt.Errorf("network namespace: %w", err)
	}
	return uint32(st.Ino), nil
}

// do calls f on a thread that is in the namespace. What f makes there (sockets,
// processes) stays in it; goroutines that f starts do not run in it.
func (ns *namespace) do(f func() error) error {
	return onThread(func() error {
		if err := unix.Setns(int(ns.file.Fd()), unix.CLONE_NEWNET); err != nil {
			return fmt.Errorf("entering the network namespace: %w", err)
		}
		return f()
	})
}

// onThread calls f on a thread that may change its namespace, and puts it back
// after that. A thread that cannot be put back ends.
func onThread(f func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread()
		own, err := os.Open(ownNamespace)
		if err != nil {
			runtime.UnlockOSThread()
			done <- err
			return
		}
		defer own.Close()
		err = f()
		if back := unix.Setns(int(own.Fd()), unix.CLONE_NEWNET); back != nil {
			err = errors.Join(err, fmt.Errorf("leaving the network namespace: %w", back))
		} else {
			runtime.UnlockOSThread()
		}
		done <- err
	}()
	return <-done
}

// run calls a program of iproute2 in the present thread's namespace.
func run(name string, args ...string) error {
	cmd := exec.Command(name, args...)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%v: %w: %s (iproute2 and root are needed)", cmd, err, out)
	}
	return nil
}
