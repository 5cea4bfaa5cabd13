//go:build linux

// Command guest is the first process of a test machine: it mounts what a system
// has, loads the modules it was given, runs the programs under /tests one after
// the other, says on the second serial line how each ended, and switches the
// machine off.
package main

import (
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// results is the second serial line: the kernel's own messages go to the first.
const results = "/dev/ttyS1"

var mounts = []struct {
	kind, at string
	optional bool
}{
	{kind: "proc", at: "/proc"},
	{kind: "sysfs", at: "/sys"},
	{kind: "devtmpfs", at: "/dev"},
	{kind: "tmpfs", at: "/tmp"},
	{kind: "tmpfs", at: "/run"},
	{kind: "tracefs", at: "/sys/kernel/tracing", optional: true},
	{kind: "bpf", at: "/sys/fs/bpf"},
	{kind: "cgroup2", at: "/sys/fs/cgroup"},
	{kind: "securityfs", at: "/sys/kernel/security", optional: true},
}

func main() {
	out := os.Stderr // until there is a /dev
	status := 1
	err := setUp()
	if f, e := os.OpenFile(results, os.O_WRONLY, 0); e == nil {
		out = f
	} else {
		err = errors.Join(err, e)
	}
	if err != nil {
		fmt.Fprintln(out, "guest: ", err)
	} else {
		status = run(out)
	}
	// the host takes this line, not qemu's exit status, for the verdict: a panic has none
	fmt.Fprintf(out, "guest: exit %d\n", status)
	_ = out.Sync()
	drain(out)
	_ = unix.Reboot(unix.LINUX_REBOOT_CMD_POWER_OFF)
	select {} // the first process must not end
}

func setUp() error {
	for _, m := range mounts {
		if err := os.MkdirAll(m.at, 0o755); err != nil && !m.optional {
			return err
		}
		if err := unix.Mount(m.kind, m.at, m.kind, 0, ""); err != nil && !m.optional {
			return fmt.Errorf("mounting %s on %s: %w", m.kind, m.at, err)
		}
	}
	modules, err := filepath.Glob("/modules/*.ko")
	if err != nil {
		return err
	}
	slices.Sort(modules) // the host numbered them in the order in which they depend on each other
	for _, m := range modules {
		if err := load(m); err != nil {
			return fmt.Errorf("loading %s: %w", filepath.Base(m), err)
		}
	}
	if err := up("lo"); err != nil {
		return fmt.Errorf("bringing lo up: %w", err)
	}
	if _, err := os.Stat("/dev/vda"); err == nil {
		if err := os.MkdirAll("/disk", 0o755); err != nil {
			return err
		}
		if err := unix.Mount("/dev/vda", "/disk", "ext4", 0, ""); err != nil {
			return fmt.Errorf("mounting the disk: %w", err)
		}
	}
	// what limits a test sets, its groups must be able to
	return os.WriteFile("/sys/fs/cgroup/cgroup.subtree_control", []byte("+cpu +io +memory +pids"), 0)
}

func load(module string) error {
	f, err := os.Open(module)
	if err != nil {
		return err
	}
	defer f.Close()
	err = unix.FinitModule(int(f.Fd()), "", 0)
	if errors.Is(err, unix.EEXIST) {
		return nil
	}
	return err
}

func up(name string) error {
	i, err := net.InterfaceByName(name)
	if err != nil {
		return err
	}
	s, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM, 0)
	if err != nil {
		return err
	}
	defer unix.Close(s)
	req, err := unix.NewIfreq(i.Name)
	if err != nil {
		return err
	}
	req.SetUint16(unix.IFF_UP | unix.IFF_RUNNING)
	return unix.IoctlIfreq(s, unix.SIOCSIFFLAGS, req)
}

// run runs each of /tests/*.test in /disk (or /tmp where there is none), with the flags in the file beside it.
func run(out *os.File) int {
	programs, err := filepath.Glob("/tests/*.test")
	if err != nil || len(programs) == 0 {
		fmt.Fprintln(out, "guest: nothing to run", err)
		return 1
	}
	dir := "/disk"
	if _, err := os.Stat(dir); err != nil {
		dir = "/tmp"
	}
	status := 0
	for _, p := range programs {
		args, err := os.ReadFile(strings.TrimSuffix(p, ".test") + ".args")
		if err != nil {
			fmt.Fprintln(out, "guest:", err)
			return 1
		}
		cmd := exec.Command(p, strings.Fields(string(args))...)
		cmd.Dir = dir
		cmd.Env = append(os.Environ(), "HOME=/tmp", "PATH=/tests", "TMPDIR=/tmp", "EBPFLLM_KERNELTEST_SERVER=/tests/server", "EBPFLLM_KERNELTEST_EMULATED=1")
		cmd.Stdout, cmd.Stderr = out, out
		fmt.Fprintf(out, "guest: run %s\n", filepath.Base(p))
		if err := cmd.Run(); err != nil {
			fmt.Fprintf(out, "guest: %s: %v\n", filepath.Base(p), err)
			status = 1
		}
	}
	return status
}

// drain waits until the serial line has sent what it was given.
func drain(f *os.File) {
	for range 100 {
		var n int32
		_, _, e := syscall.Syscall(syscall.SYS_IOCTL, f.Fd(), unix.TIOCOUTQ, uintptr(unsafe.Pointer(&n)))
		if e != 0 || n == 0 {
			return
		}
		time.Sleep(10 * time.Millisecond)
	}
}
