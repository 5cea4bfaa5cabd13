//go:build linux

package kerneltest

import (
	"bufio"
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"go.uber.org/zap/zaptest"
	"golang.org/x/sys/unix"

	"github.com/ebpfllm/ebpfllm/internal/assemble"
	"github.com/ebpfllm/ebpfllm/internal/cserver"
	"github.com/ebpfllm/ebpfllm/internal/probe"
	"github.com/ebpfllm/ebpfllm/internal/stage"
)

// requireRoot skips where the kernel would refuse.
func requireRoot(t *testing.T) {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: loads programs into the kernel")
	}
}

// emulatedEnv in the environment says that the machine is emulated.
const emulatedEnv = "EBPFLLM_KERNELTEST_EMULATED"

func emulated() bool { return os.Getenv(emulatedEnv) != "" }

// atLeast is what must at least be measured of ns that a test caused: in an emulated
// machine, where everything beside it takes long and is the stage as well, anything.
func atLeast(ns int64) int64 {
	if emulated() {
		return 0
	}
	return ns
}

// server is a real process that the test asks.
type server struct {
	t    *testing.T
	cmd  *exec.Cmd
	addr string
	port uint16
	file string // that /read, /direct and /map use
}

// builtServer in the environment is the C server, where there is no compiler.
const builtServer = "EBPFLLM_KERNELTEST_SERVER"

var compile = sync.OnceValues(func() (string, error) {
	if built := os.Getenv(builtServer); built != "" {
		return built, nil
	}
	out := filepath.Join(os.TempDir(), fmt.Sprintf("ebpfllm-kerneltest-%d", os.Getpid()))
	return out, cserver.Build(out)
})

// startC starts the C server: a thread per connection, or one event loop.
func startC(t *testing.T, loop bool, options ...string) *server {
	t.Helper()
	binary, err := compile()
	require.NoError(t, err)
	// not in a tmpfs, which has no page cache misses
	file, err := os.CreateTemp(".", "kerneltest-*.data")
	require.NoError(t, err)
	t.Cleanup(func() { _ = os.Remove(file.Name()) })
	// incompressible, so that no layer below makes holes of it
	block := make([]byte, 1<<20)
	for i := range block {
		block[i] = byte(i*2654435761>>13) ^ byte(i)
	}
	for range 16 {
		_, err := file.Write(block)
		require.NoError(t, err)
	}
	require.NoError(t, file.Sync())
	require.NoError(t, file.Close())
	args := append([]string{file.Name()}, options...)
	if loop {
		args = append(args, "-loop")
	}
	s := start(t, func(port string) *exec.Cmd { return exec.Command(binary, append([]string{port}, args...)...) })
	s.file = file.Name()
	return s
}

// startGo starts this test binary as a server of net/http.
func startGo(t *testing.T, env ...string) *server {
	t.Helper()
	return startGoOn(t, "127.0.0.1", env...)
}

func startGoOn(t *testing.T, host string, env ...string) *server {
	t.Helper()
	return startOn(t, host, func(port string) *exec.Cmd {
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(append(os.Environ(), serveEnv+"="+host+":"+port), env...)
		return cmd
	})
}

func start(t *testing.T, command func(port string) *exec.Cmd) *server {
	t.Helper()
	return startOn(t, "127.0.0.1", command)
}

func startOn(t *testing.T, host string, command func(port string) *exec.Cmd) *server {
	t.Helper()
	l, err := net.Listen("tcp", host+":0")
	require.NoError(t, err)
	port := l.Addr().(*net.TCPAddr).Port
	require.NoError(t, l.Close())
	s := &server{t: t, cmd: command(strconv.Itoa(port)), addr: l.Addr().String(), port: uint16(port)}
	s.cmd.Stderr = os.Stderr
	out, err := s.cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, s.cmd.Start())
	t.Cleanup(func() {
		_ = s.cmd.Process.Kill()
		_ = s.cmd.Wait()
	})
	line, err := bufio.NewReader(out).ReadString('\n')
	require.NoError(t, err, "the server did not come up")
	require.Equal(t, "ready\n", line)
	return s
}

func (s *server) pid() uint32 { return uint32(s.cmd.Process.Pid) }

// stop stops the server and returns once none of its threads runs any more: the
// signal is sent before that, and a thread that another CPU runs may still answer.
func (s *server) stop() {
	s.t.Helper()
	require.NoError(s.t, s.cmd.Process.Signal(syscall.SIGSTOP))
	require.Eventually(s.t, func() bool {
		states, err := threadStates(s.pid())
		require.NoError(s.t, err)
		return strings.Trim(states, "T") == ""
	}, 10*time.Second, time.Millisecond, "the server does not stop")
}

// asleep returns once all of the server's threads sleep.
func (s *server) asleep() {
	s.t.Helper()
	require.Eventually(s.t, func() bool {
		states, err := threadStates(s.pid())
		require.NoError(s.t, err)
		return strings.Trim(states, "S") == ""
	}, 10*time.Second, time.Millisecond, "the server does not come to rest")
}

// threadStates has a letter for each thread of a process, as in /proc/PID/stat.
func threadStates(pid uint32) (string, error) {
	files, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", pid))
	if err != nil {
		return "", err
	}
	var states strings.Builder
	for _, f := range files {
		b, err := os.ReadFile(f)
		if errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ESRCH) {
			continue // it has ended meanwhile
		}
		if err != nil {
			return "", err
		}
		if _, rest, ok := strings.Cut(string(b), ") "); ok && rest != "" {
			states.WriteByte(rest[0])
		}
	}
	return states.String(), nil
}

// cpuTime is how long the server's first thread has run, in nanoseconds.
func (s *server) cpuTime() int64 {
	s.t.Helper()
	return cpuTime(s.t, s.pid())
}

// cpuTime is how long a process's first thread has run, in nanoseconds.
func cpuTime(t *testing.T, pid uint32) int64 {
	t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/schedstat", pid))
	require.NoError(t, err)
	var ns int64
	_, err = fmt.Sscan(string(b), &ns)
	require.NoError(t, err)
	return ns
}

// evict drops the server's file from the page cache, what is written to it first.
func (s *server) evict() {
	s.t.Helper()
	f, err := os.Open(s.file)
	require.NoError(s.t, err)
	defer f.Close()
	require.NoError(s.t, f.Sync())
	require.NoError(s.t, unix.Fadvise(int(f.Fd()), 0, 0, unix.FADV_DONTNEED))
}

// watch is a probe on servers, and what it found.
type watch struct {
	t     *testing.T
	probe *probe.Probe

	mu          sync.Mutex
	begun       int
	finished    []assemble.Request
	occurrences []assemble.Occurrence
	changed     chan struct{}
	unparsed    map[string]uint64
}

func (w *watch) Begin(*assemble.Request) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.begun++
}

func (w *watch) Occurrence(o *assemble.Occurrence) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.occurrences = append(w.occurrences, *o)
}

func (w *watch) Finish(r *assemble.Request) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.finished = append(w.finished, *r)
	select {
	case w.changed <- struct{}{}:
	default:
	}
}

// observe starts a probe on the servers.
func observe(t *testing.T, cfg probe.Config, servers ...*server) *watch {
	t.Helper()
	return observeSlowly(t, cfg, func() {}, servers...)
}

// observeSlowly calls pause before each event is handled.
func observeSlowly(t *testing.T, cfg probe.Config, pause func(), servers ...*server) *watch {
	t.Helper()
	if cfg.RingBytes == 0 {
		cfg.RingBytes = 1 << 20
	}
	if cfg.MinDuration == 0 {
		cfg.MinDuration = time.Millisecond
	}
	p, err := probe.New(cfg, zaptest.NewLogger(t))
	require.NoError(t, err)
	w := &watch{t: t, probe: p, changed: make(chan struct{}, 1)}
	var st syscall.Stat_t
	require.NoError(t, syscall.Stat("/proc/self/ns/net", &st))
	for _, s := range servers {
		require.NoError(t, p.AddPort(uint32(st.Ino), s.port))
		tracking := probe.Tracking{}
		if s.file == "" {
			tracking = probe.Tracking{IsGo: true, GoOffset: -8}
		}
		require.NoError(t, p.Track(s.pid(), tracking))
	}
	a := assemble.New(assemble.Config{MinDuration: cfg.MinDuration.Nanoseconds(), Unavailable: p.Unavailable()}, w)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() {
		done <- p.Run(ctx, func(e probe.Event) {
			pause()
			a.Handle(e)
			if _, ok := e.(*probe.Tick); ok {
				w.mu.Lock()
				w.unparsed = a.Unparsed()
				w.mu.Unlock()
			}
		})
	}()
	t.Cleanup(func() {
		cancel()
		require.NoError(t, <-done)
		require.NoError(t, p.Close())
	})
	return w
}

// wait returns the finished requests, in the order of their beginnings, once there are n
// of them: one that a stall has delayed is given on later than others.
func (w *watch) wait(n int) []assemble.Request {
	w.t.Helper()
	deadline := time.After(10 * time.Second)
	for {
		w.mu.Lock()
		if len(w.finished) >= n {
			defer w.mu.Unlock()
			list := slices.Clone(w.finished)
			slices.SortStableFunc(list, func(a, b assemble.Request) int { return cmp.Compare(a.Start, b.Start) })
			return list
		}
		w.mu.Unlock()
		select {
		case <-w.changed:
		case <-deadline:
			w.mu.Lock()
			defer w.mu.Unlock()
			require.FailNowf(w.t, "requests missing", "%d of %d seen; unparsed %v", len(w.finished), n, w.unparsed)
		}
	}
}

// awaitBegun returns once n requests have been read.
func (w *watch) awaitBegun(n int) {
	w.t.Helper()
	require.Eventually(w.t, func() bool {
		w.mu.Lock()
		defer w.mu.Unlock()
		return w.begun >= n
	}, 10*time.Second, 5*time.Millisecond, "requests are not read")
}

// of returns the occurrences of a request.
func (w *watch) of(r *assemble.Request) []assemble.Occurrence {
	w.mu.Lock()
	defer w.mu.Unlock()
	var list []assemble.Occurrence
	for _, o := range w.occurrences {
		if o.Key == r.Key {
			list = append(list, o)
		}
	}
	return list
}

// describe prints a request's stages, for failures.
func describe(r *assemble.Request) string {
	var b strings.Builder
	fmt.Fprintf(&b, "%s %s %d, %v", r.Head.Method, r.Head.Path, r.Status, time.Duration(r.End-r.Start))
	for s, v := range r.Exclusive {
		if v > 0 || r.Plain[s] > 0 {
			fmt.Fprintf(&b, "\n  %-14s %-12v", stage.Stage(s), time.Duration(v))
			if r.Plain[s] > 0 {
				fmt.Fprintf(&b, " plain %v", time.Duration(r.Plain[s]))
			}
		}
	}
	for s, v := range r.Waker {
		if v > 0 {
			fmt.Fprintf(&b, "\n  %-14s %-12v on a waker", stage.Stage(s), time.Duration(v))
		}
	}
	fmt.Fprintf(&b, "\n  incomplete %v, missing %v", r.Incomplete, r.Missing)
	return b.String()
}
