// Package process runs other programs for tests and tools: pinned to CPUs, with their
// output in a file, and ended with their parent at the latest.
package process

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// Process is a child with its output in a file.
type Process struct {
	name   string
	cmd    *exec.Cmd
	Log    string        // path of its output
	exited chan struct{} // closed when it has ended, after err is set
	err    error
}

// Start starts a command on the given CPUs, this process's if there are none, in a process
// group of its own. Its output goes to the file log. It ends with this process at the
// latest.
func Start(name, log string, cpus []int, env []string, path string, args ...string) (*Process, error) {
	return start(&syscall.SysProcAttr{Setpgid: true}, name, log, cpus, env, path, args...)
}

// StartApart is Start in a session of its own and with the usual nice value, so that the
// command has nothing of the precedence that Favour gave to this process.
func StartApart(name, log string, cpus []int, env []string, path string, args ...string) (*Process, error) {
	return start(&syscall.SysProcAttr{Setsid: true}, name, log, cpus, env, path, args...)
}

func start(attr *syscall.SysProcAttr, name, log string, cpus []int, env []string, path string, args ...string) (*Process, error) {
	file, err := os.Create(log)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	p := &Process{name: name, Log: log, exited: make(chan struct{}), cmd: exec.Command(path, args...)}
	p.cmd.Stdout, p.cmd.Stderr = file, file
	p.cmd.Env = append(os.Environ(), env...)
	attr.Pdeathsig = syscall.SIGKILL
	p.cmd.SysProcAttr = attr

	started := make(chan error)
	go func() {
		// The child inherits this thread's CPUs and dies with the thread, so
		// the thread waits for it. It ends with the goroutine.
		runtime.LockOSThread()
		var err error
		if len(cpus) > 0 {
			var set unix.CPUSet
			for _, cpu := range cpus {
				set.Set(cpu)
			}
			err = unix.SchedSetaffinity(0, &set)
		}
		if err == nil && attr.Setsid {
			err = unix.SchedSetAttr(0, &unix.SchedAttr{Size: unix.SizeofSchedAttr, Policy: unix.SCHED_NORMAL}, 0)
		}
		if err == nil {
			err = p.cmd.Start()
		}
		started <- err
		if err == nil {
			p.err = p.cmd.Wait()
			close(p.exited)
		}
	}()
	if err := <-started; err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	return p, nil
}

// PID is the child's, also when it has ended.
func (p *Process) PID() int { return p.cmd.Process.Pid }

// WaitFor returns when the condition holds. It fails with the tail of the log
// when the process ends first or ctx does.
func (p *Process) WaitFor(ctx context.Context, what string, condition func() bool) error {
	for !condition() {
		select {
		case <-p.exited:
			return fmt.Errorf("%s ended before it was %s (%w); the end of %s:\n%s", p.name, what, p.err, p.Log, p.Tail())
		case <-ctx.Done():
			return fmt.Errorf("%s was not %s in time (%w); the end of %s:\n%s", p.name, what, context.Cause(ctx), p.Log, p.Tail())
		case <-time.After(20 * time.Millisecond):
		}
	}
	return nil
}

// Stop ends the process by SIGTERM, and by SIGKILL after ten seconds. It fails
// when the process did not end well.
func (p *Process) Stop() error {
	select {
	case <-p.exited:
	default:
		p.cmd.Process.Signal(syscall.SIGCONT)
		p.cmd.Process.Signal(syscall.SIGTERM)
	}
	select {
	case <-p.exited:
	case <-time.After(10 * time.Second):
		p.Abandon()
		return fmt.Errorf("%s did not end within 10 s of SIGTERM; the end of %s:\n%s", p.name, p.Log, p.Tail())
	}
	if p.err != nil {
		return fmt.Errorf("%s: %w; the end of %s:\n%s", p.name, p.err, p.Log, p.Tail())
	}
	return nil
}

// Abandon ends a process at once, with those of its group.
func (p *Process) Abandon() {
	_ = unix.Kill(-p.PID(), unix.SIGKILL) // no such group: all have ended
	<-p.exited
}

// Exited is closed when the process has ended.
func (p *Process) Exited() <-chan struct{} { return p.exited }

// Err is how the process ended; it may be called when it has.
func (p *Process) Err() error { return p.err }

// Group are the processes of its group: it and its children that have not left it.
func (p *Process) Group() (pids []int, err error) {
	all, err := filepath.Glob("/proc/[0-9]*/stat")
	if err != nil {
		return nil, err
	}
	for _, path := range all {
		text, err := os.ReadFile(path)
		if err != nil {
			continue // it has ended
		}
		// PID (NAME) STATE PARENT GROUP, and a name may hold anything
		after := string(text[bytes.LastIndexByte(text, ')')+1:])
		var state string
		var parent, group int
		if _, err := fmt.Sscan(after, &state, &parent, &group); err != nil {
			return nil, fmt.Errorf("%s: %w", path, err)
		}
		pid, err := strconv.Atoi(filepath.Base(filepath.Dir(path)))
		if err == nil && group == p.PID() && state != "Z" {
			pids = append(pids, pid)
		}
	}
	return pids, nil
}

// Tail is the end of the log.
func (p *Process) Tail() string {
	const lines, size = 20, 16 << 10
	file, err := os.Open(p.Log)
	if err != nil {
		return err.Error()
	}
	defer file.Close()
	if info, err := file.Stat(); err == nil && info.Size() > size {
		if _, err := file.Seek(-size, io.SeekEnd); err != nil {
			return err.Error()
		}
	}
	text, err := io.ReadAll(file)
	if err != nil {
		return err.Error()
	}
	all := strings.Split(strings.TrimRight(string(text), "\n"), "\n")
	return strings.Join(all[max(0, len(all)-lines):], "\n")
}

// LogLine returns what follows the prefix in the first log line that has it.
func (p *Process) LogLine(prefix string) (rest string, found bool) {
	file, err := os.Open(p.Log)
	if err != nil {
		return "", false
	}
	defer file.Close()
	scanner := bufio.NewScanner(file)
	for scanner.Scan() {
		if rest, ok := strings.CutPrefix(scanner.Text(), prefix); ok {
			return rest, true
		}
	}
	return "", false
}

// FreeAddress returns a loopback address that nobody listens on.
func FreeAddress() (string, error) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	return listener.Addr().String(), listener.Close()
}

// SplitCPUs gives the server the last CPU that this process may use, and itself
// and the collector the others, so that a busy server CPU slows the server only.
func SplitCPUs() (server int, rest []int, err error) {
	var set unix.CPUSet
	if err := unix.SchedGetaffinity(0, &set); err != nil {
		return 0, nil, err
	}
	var cpus []int
	for cpu := range len(set) * 64 {
		if set.IsSet(cpu) {
			cpus = append(cpus, cpu)
		}
	}
	if len(cpus) < 2 {
		return 0, nil, errors.New("needs two CPUs, one for the server alone; this process may use only one")
	}
	return cpus[len(cpus)-1], cpus[:len(cpus)-1], nil
}

// Favour moves a process to the given CPUs and gives it precedence over the
// other work of this machine, by the lowest nice value. Threads to come inherit
// both. Where the kernel shares the CPU between sessions first (autogroup), the
// nice value counts within the session only, and the session gets one, too. It
// gets none where the kernel has no such groups (ENOENT) or where no session was
// made since boot, as in some containers: the process is in the root group then,
// whose share cannot be set (EINVAL), and its nice value counts as it is.
func Favour(pid int, cpus ...int) error {
	session := fmt.Sprintf("/proc/%d/autogroup", pid)
	err := os.WriteFile(session, []byte("-20"), 0)
	if err != nil && !errors.Is(err, os.ErrNotExist) && !errors.Is(err, unix.EINVAL) {
		return fmt.Errorf("nice value of a session: %w", err)
	}
	var set unix.CPUSet
	for _, cpu := range cpus {
		set.Set(cpu)
	}
	// A slice that is shorter than others' lets it take the CPU from them as soon as it
	// wakes; before Linux 6.12 the value is ignored.
	priority := unix.SchedAttr{Size: unix.SizeofSchedAttr, Policy: unix.SCHED_NORMAL, Nice: -20, Runtime: uint64(time.Millisecond)}
	return EachThread(pid, func(tid int) error {
		return errors.Join(unix.SchedSetaffinity(tid, &set), unix.SchedSetAttr(tid, &priority, 0))
	})
}

// KeepSession returns what gives a process's session the nice value back that it has
// now, which Favour changes. It does nothing where sessions have none.
func KeepSession(pid int) (restore func() error, err error) {
	session := fmt.Sprintf("/proc/%d/autogroup", pid)
	text, err := os.ReadFile(session)
	_, value, found := strings.Cut(string(text), " nice ")
	if errors.Is(err, os.ErrNotExist) || err == nil && !found {
		return func() error { return nil }, nil
	}
	if err != nil {
		return nil, fmt.Errorf("nice value of a session: %w", err)
	}
	return func() error { return os.WriteFile(session, []byte(strings.TrimSpace(value)), 0) }, nil
}

// EachThread does something to every thread of a process.
func EachThread(pid int, do func(tid int) error) error {
	for range 2 { // threads may be born while we look, of one that we did not see yet
		threads, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
		if err != nil {
			return err
		}
		for _, thread := range threads {
			tid, err := strconv.Atoi(thread.Name())
			if err != nil {
				return err
			}
			if err := do(tid); err != nil && !errors.Is(err, unix.ESRCH) {
				return fmt.Errorf("thread %d: %w", tid, err)
			}
		}
	}
	return nil
}

// RunDelay is how long the threads of a process have waited for a CPU so far, in
// sum, by the scheduler's own account. Threads that ended are not in it.
func RunDelay(pid int) (time.Duration, error) {
	threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/schedstat", pid))
	if err != nil {
		return 0, err
	}
	var sum time.Duration
	for _, path := range threads {
		text, err := os.ReadFile(path)
		if errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ESRCH) {
			continue
		}
		if err != nil {
			return 0, err
		}
		var ran, waited int64
		if _, err := fmt.Sscan(string(text), &ran, &waited); err != nil {
			return 0, fmt.Errorf("%s: %w", path, err)
		}
		sum += time.Duration(waited)
	}
	return sum, nil
}
