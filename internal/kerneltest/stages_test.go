//go:build linux

// Package kerneltest runs the kernel side on real servers: whatever it claims
// of a stage is compared with a delay that the test caused.
package kerneltest

import (
	"bufio"
	"bytes"
	"cmp"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/ebpfllm/ebpfllm/internal/assemble"
	"github.com/ebpfllm/ebpfllm/internal/probe"
	"github.com/ebpfllm/ebpfllm/internal/stage"
)

const (
	ms        = int64(time.Millisecond)
	delayMS   = 60
	tolerance = 0.8 // a stage must hold this share of what was injected; the machine is shared
)

// get asks the server once on a connection of its own.
func (s *server) get(path string) {
	s.t.Helper()
	s.getWhile(path, func() {})
}

// getWhile does something once the response's body has begun.
func (s *server) getWhile(path string, begun func()) {
	s.t.Helper()
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: 30 * time.Second}
	r, err := client.Get("http://" + s.addr + path)
	require.NoError(s.t, err)
	defer r.Body.Close()
	b := bufio.NewReader(r.Body)
	_, _ = b.Peek(1) // an empty one ends at once
	begun()
	_, err = io.Copy(io.Discard, b)
	require.NoError(s.t, err)
}

// A fault delays the request to path, and says by how much at least.
type fault struct {
	name  string
	path  string
	cause func(t *testing.T, s *server) (undo func()) // before the request
	want  stage.Stage
	least int64 // nanoseconds of want; 0: most of the request's time
}

func evicted(_ *testing.T, s *server) func() {
	s.evict()
	return func() {}
}

func burnServer(t *testing.T, s *server) func() {
	t.Helper()
	return burn(t, s.pid())
}

// burn keeps one CPU busy with 4 threads, and the process on it.
func burn(t *testing.T, pid uint32) func() {
	t.Helper()
	var cpu unix.CPUSet
	cpu.Set(0)
	stop := make(chan struct{})
	ready := make(chan error, 4)
	for range cap(ready) {
		go func() {
			runtime.LockOSThread() // never unlocked: the thread ends with the goroutine, and its affinity with it
			ready <- unix.SchedSetaffinity(0, &cpu)
			for {
				select {
				case <-stop:
					return
				default: //nolint:staticcheck // it is there to spin
				}
			}
		}()
	}
	for range cap(ready) {
		require.NoError(t, <-ready)
	}
	pin(t, pid)
	return func() { close(stop) }
}

var faults = []fault{
	{name: "computation is cpu", path: "/cpu?60", want: stage.CPU},
	{name: "sleep is wait", path: "/sleep?60", want: stage.Wait, least: delayMS * ms},
	{name: "a contended mutex is lock", path: "/lock?60", want: stage.Lock, least: delayMS * ms},
	{name: "an empty pipe is syscall", path: "/pipe?60", want: stage.Syscall, least: delayMS * ms},
	{name: "a cold buffered read is page_cache", path: "/read", cause: evicted, want: stage.PageCache},
	{name: "a direct read is block_io", path: "/direct", want: stage.BlockIO},
	{name: "an evicted mapping is page_fault", path: "/map", cause: evicted, want: stage.PageFault},
	{name: "fresh memory is page_fault", path: "/touch?64", want: stage.PageFault},
	{name: "a stolen processor is run_queue", path: "/cpu?200", cause: burnServer, want: stage.RunQueue},
	{name: "SIGSTOP is stopped", path: "/sleep?90", cause: stopAndGo, want: stage.Stopped, least: delayMS * ms},
}

// stopAndGo stops the server once it sleeps for the request, and lets it go on delayMS after that.
func stopAndGo(t *testing.T, s *server) func() {
	t.Helper()
	done := make(chan struct{})
	go func() {
		defer close(done)
		if !assert.Eventually(t, s.sleeps, 10*time.Second, time.Millisecond, "no thread of the server sleeps") {
			return
		}
		s.pause()
	}()
	return func() { <-done }
}

// pause stops the server for delayMS, counted from when all its threads have stopped.
func (s *server) pause() {
	_ = s.cmd.Process.Signal(syscall.SIGSTOP)
	assert.Eventually(s.t, s.stopped, 10*time.Second, time.Millisecond, "the server does not stop")
	<-time.After(delayMS * time.Millisecond)
	_ = s.cmd.Process.Signal(syscall.SIGCONT)
}

// stopped tells whether every thread of the server is stopped.
func (s *server) stopped() bool {
	files, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", s.pid()))
	for _, f := range files {
		b, _ := os.ReadFile(f)
		if i := bytes.LastIndexByte(b, ')'); i >= 0 && !bytes.HasPrefix(b[i:], []byte(") T")) {
			return false
		}
	}
	return len(files) > 0
}

// sleeps tells whether a thread of the server is in nanosleep or clock_nanosleep.
func (s *server) sleeps() bool {
	files, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/syscall", s.pid()))
	for _, f := range files {
		b, _ := os.ReadFile(f)
		number, _, _ := strings.Cut(string(b), " ")
		if number == strconv.Itoa(unix.SYS_NANOSLEEP) || number == strconv.Itoa(unix.SYS_CLOCK_NANOSLEEP) {
			return true
		}
	}
	return false
}

// top is the request's largest stage, of the stalls if a stall is wanted: how
// long a server computes beside it is its own affair. The machine is shared:
// time in the run queue that no test caused is real, and left out. So is, of an
// emulated machine, what becomes of each request while it does not get on: time
// on a CPU, for its first pages, and in the socket until there is a thread for it.
func top(r *assemble.Request, want stage.Stage) stage.Stage {
	best := stage.Unattributed
	for s, v := range r.Exclusive {
		if stage.Stage(s) == stage.RunQueue && want != stage.RunQueue || want.Stall() && !stage.Stage(s).Stall() {
			continue
		}
		if emulated() && stage.Stage(s) != want && slices.Contains([]stage.Stage{stage.CPU, stage.PageFault, stage.AcceptQueue, stage.ReceiveQueue}, stage.Stage(s)) {
			continue
		}
		if v > r.Exclusive[best] {
			best = stage.Stage(s)
		}
	}
	return best
}

func requireWhole(t *testing.T, r *assemble.Request) {
	t.Helper()
	var sum int64
	for s, v := range r.Exclusive {
		assert.GreaterOrEqual(t, v, int64(0), stage.Stage(s))
		sum += v
	}
	assert.Equal(t, int64(r.End-r.Start), sum, "stages and unattributed sum to the wall time")
	assert.Empty(t, r.Incomplete, describe(r))
	assert.Empty(t, r.Refused)
}

func TestThreadStagesNameTheInjectedFault(t *testing.T) {
	requireRoot(t)
	for _, shape := range []string{"thread per connection", "event loop"} {
		for _, f := range faults {
			t.Run(shape+"/"+f.name, func(t *testing.T) {
				s := startC(t, shape == "event loop")
				w := observe(t, probe.Config{}, s)
				s.get("/") // pages in the server itself
				if f.cause != nil {
					defer f.cause(t, s)()
				}
				s.get(f.path)
				r := &w.wait(2)[1]
				requireWhole(t, r)
				assert.Equal(t, f.want.String(), top(r, f.want).String(), describe(r))
				assert.GreaterOrEqual(t, float64(r.Exclusive[f.want]), tolerance*float64(f.least), describe(r))
				if f.want.Stall() {
					assertOccurrences(t, w.of(r), f.want, r)
				}
			})
		}
	}
}

// assertOccurrences checks that the stall is also told piece by piece, without
// overlap.
func assertOccurrences(t *testing.T, list []assemble.Occurrence, want stage.Stage, r *assemble.Request) {
	t.Helper()
	var sum int64
	for i, o := range list {
		assert.GreaterOrEqual(t, o.Start, r.Start)
		assert.LessOrEqual(t, o.End, r.End)
		assert.LessOrEqual(t, o.Duration, int64(o.End-o.Start))
		for _, p := range list[:i] {
			assert.True(t, o.Start >= p.End || p.Start >= o.End, "%v overlaps %v", o, p)
		}
		if o.Stage == want {
			sum += o.Duration
		}
	}
	// short stretches have no record of their own
	total := max(r.Exclusive[want], r.Plain[want])
	assert.LessOrEqual(t, sum, total+ms, describe(r))
	if total > 20*ms && want != stage.PageFault && want != stage.Reclaim {
		assert.Greater(t, sum, total/2, "%v %s", list, describe(r))
	}
}

func TestThrottlingIsToldFromTheRunQueue(t *testing.T) {
	requireRoot(t)
	s := startC(t, false)
	group, v2 := cgroup(t, "cpu", s)
	write := func(name, value string) { require.NoError(t, os.WriteFile(group+"/"+name, []byte(value), 0o644)) }
	throttled := func() int64 { return counter(t, group+"/cpu.stat", "throttled_time") }
	if v2 {
		write("cpu.max", "10000 100000")
		throttled = func() int64 { return counter(t, group+"/cpu.stat", "throttled_usec") * 1000 }
	} else {
		write("cpu.cfs_period_us", "100000")
		write("cpu.cfs_quota_us", "10000")
	}
	write("cgroup.procs", strconv.FormatUint(uint64(s.pid()), 10))
	w := observe(t, probe.Config{}, s)
	before := throttled()
	s.get("/cpu?800")
	r := &w.wait(1)[0]
	truth := float64(throttled() - before) // the kernel's own account
	requireWhole(t, r)
	t.Logf("throttled for %v: %s", time.Duration(truth), describe(r))
	assert.InEpsilon(t, truth, float64(r.Exclusive[stage.Throttled]), 0.2, describe(r))
	assert.Equal(t, "throttled", top(r, stage.Unknown).String(), describe(r))
}

func TestAHeldAcceptLoopIsAcceptQueue(t *testing.T) {
	requireRoot(t)
	for _, how := range []string{"/accept", "/accept_cpu"} {
		t.Run(how, func(t *testing.T) {
			s := startC(t, false)
			w := observe(t, probe.Config{}, s)
			s.get(how + "?60") // the loop stalls before its next accept, or is in it now and stalls before the one after
			s.get("/")
			s.get("/")
			finished := w.wait(3)
			r := &finished[1]
			if finished[2].Exclusive[stage.AcceptQueue] > r.Exclusive[stage.AcceptQueue] {
				r = &finished[2]
			}
			requireWhole(t, r)
			assert.Equal(t, "accept_queue", top(r, stage.Unknown).String(), describe(r))
			assert.Greater(t, float64(r.Exclusive[stage.AcceptQueue]), tolerance*delayMS*float64(ms), describe(r))
			assert.GreaterOrEqual(t, r.Plain[stage.AcceptQueue], r.Exclusive[stage.AcceptQueue])
			assertOccurrences(t, w.of(r), stage.AcceptQueue, r)
		})
	}
}

// More connections wait than the kernel side looks at, and than it can look at
// with one event.
func TestALongAcceptQueueIsAcceptQueueForEachOfIt(t *testing.T) {
	requireRoot(t)
	const waiting, hold = 100, 300 // ms
	s := startC(t, false)
	w := observe(t, probe.Config{}, s)
	s.get(fmt.Sprintf("/accept?%d", hold))
	var conns []net.Conn
	for range waiting + 1 { // the loop may have been in accept, and takes the first at once
		conn, err := net.Dial("tcp4", s.addr)
		require.NoError(t, err)
		defer conn.Close()
		_, err = io.WriteString(conn, "GET / HTTP/1.1\r\nHost: x\r\n\r\n")
		require.NoError(t, err)
		conns = append(conns, conn)
	}
	for _, conn := range conns {
		r, err := http.ReadResponse(bufio.NewReader(conn), nil)
		require.NoError(t, err)
		require.NoError(t, r.Body.Close())
	}
	held := 0
	for _, r := range w.wait(waiting + 2)[1:] {
		// those that came last waited less, and all for some time more for a CPU
		if r.Exclusive[stage.AcceptQueue] > int64(r.End-r.Start)/2 && top(&r, stage.Unknown) == stage.AcceptQueue {
			held++
		}
	}
	assert.GreaterOrEqual(t, held, waiting)
}

// The loop was woken for the connection and accepts it at once; what it does then keeps it from reading.
func TestALoopThatIsBusyAfterAcceptIsReceiveQueue(t *testing.T) {
	requireRoot(t)
	s := startC(t, true)
	w := observe(t, probe.Config{}, s)
	s.get("/accepted?60")
	s.asleep() // one that finds the connection without having waited cannot be told from one that was busy
	s.get("/")
	r := &w.wait(2)[1]
	requireWhole(t, r)
	assert.Equal(t, "receive_queue", top(r, stage.Unknown).String(), describe(r))
	assert.Less(t, r.Plain[stage.AcceptQueue], 20*ms, describe(r))
}

func TestABusyEventLoopIsReceiveQueue(t *testing.T) {
	requireRoot(t)
	s := startC(t, true)
	w := observe(t, probe.Config{}, s)
	conn, err := net.Dial("tcp4", s.addr)
	require.NoError(t, err)
	defer conn.Close()
	ask := func() {
		_, err := io.WriteString(conn, "GET / HTTP/1.1\r\nHost: x\r\n\r\n")
		require.NoError(t, err)
	}
	reply := func() {
		r, err := http.ReadResponse(bufio.NewReader(conn), nil)
		require.NoError(t, err)
		_, err = io.Copy(io.Discard, r.Body)
		require.NoError(t, err)
	}
	ask() // accepted
	reply()
	busy := make(chan struct{})
	before := s.cpuTime()
	go func() { s.get("/cpu?90"); close(busy) }()
	require.Eventually(t, func() bool { return s.cpuTime() > before+10*ms }, 5*time.Second, time.Millisecond)
	ask()
	reply()
	<-busy
	var r *assemble.Request
	for _, f := range w.wait(3) {
		if f.Seq == 2 {
			r = &f
		}
	}
	require.NotNil(t, r)
	requireWhole(t, r)
	assert.Equal(t, "receive_queue", top(r, stage.Unknown).String(), describe(r))
	assert.Less(t, r.Exclusive[stage.CPU], 10*ms, "what the loop does for others is not this request's: "+describe(r))
}

// The bytes wait in each case; why they do makes the difference.
func TestAReaderThatIsStoppedIsNotABusyOne(t *testing.T) {
	requireRoot(t)
	for _, shape := range []string{"event loop", "goroutines"} {
		t.Run(shape, func(t *testing.T) {
			var s *server
			if shape == "goroutines" {
				s = startGo(t)
			} else {
				s = startC(t, true)
			}
			w := observe(t, probe.Config{}, s)
			conn, err := net.Dial("tcp4", s.addr)
			require.NoError(t, err)
			defer conn.Close()
			in := bufio.NewReader(conn)
			for i := range 2 {
				if i == 1 {
					s.stop()
				}
				_, err := io.WriteString(conn, "GET / HTTP/1.1\r\nHost: x\r\n\r\n")
				require.NoError(t, err)
				if i == 1 {
					<-time.After(delayMS * time.Millisecond)
					require.NoError(t, s.cmd.Process.Signal(syscall.SIGCONT))
				}
				r, err := http.ReadResponse(in, nil)
				require.NoError(t, err)
				_, err = io.Copy(io.Discard, r.Body)
				require.NoError(t, err)
				require.NoError(t, r.Body.Close())
			}
			r := &w.wait(2)[1]
			requireWhole(t, r)
			assert.Equal(t, "stopped", top(r, stage.Stopped).String(), describe(r))
			assert.Greater(t, float64(r.Exclusive[stage.Stopped]), tolerance*delayMS*float64(ms), describe(r))
			assertOccurrences(t, w.of(r), stage.Stopped, r)
		})
	}
}

func TestASlowReaderIsSendBuffer(t *testing.T) {
	requireRoot(t)
	s := startC(t, false)
	w := observe(t, probe.Config{}, s)
	conn := dialSmallWindow(t, s.addr)
	defer conn.Close()
	_, err := io.WriteString(conn, "GET /big?2048 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
	require.NoError(t, err)
	<-time.After(2 * delayMS * time.Millisecond) // the reader's slowness is the fault
	n, err := io.CopyN(io.Discard, conn, 2048<<10)
	require.NoError(t, err, n)
	r := &w.wait(1)[0]
	requireWhole(t, r)
	assert.Equal(t, "send_buffer", top(r, stage.Unknown).String(), describe(r))
	assert.Greater(t, r.Plain[stage.SendBuffer], atLeast(2*delayMS*ms*8/10), describe(r))
	assertOccurrences(t, w.of(r), stage.SendBuffer, r)
}

// dialSmallWindow connects with a receive buffer of a few kilobytes.
func dialSmallWindow(t *testing.T, addr string) net.Conn {
	t.Helper()
	d := net.Dialer{Control: func(_, _ string, c syscall.RawConn) error {
		var e error
		err := c.Control(func(fd uintptr) { e = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_RCVBUF, 4096) })
		if err != nil {
			return err
		}
		return e
	}}
	conn, err := d.Dial("tcp4", addr)
	require.NoError(t, err)
	return conn
}

func TestASlowUploadIsRequestBody(t *testing.T) {
	requireRoot(t)
	for _, loop := range []bool{false, true} {
		t.Run(fmt.Sprintf("loop=%v", loop), func(t *testing.T) {
			s := startC(t, loop)
			w := observe(t, probe.Config{}, s)
			conn, err := net.Dial("tcp4", s.addr)
			require.NoError(t, err)
			defer conn.Close()
			_, err = io.WriteString(conn, "POST /body HTTP/1.1\r\nHost: x\r\nContent-Length: 8\r\n\r\n")
			require.NoError(t, err)
			for range 4 {
				<-time.After(20 * time.Millisecond)
				_, err = io.WriteString(conn, "xx")
				require.NoError(t, err)
			}
			_, err = http.ReadResponse(bufio.NewReader(conn), nil)
			require.NoError(t, err)
			r := &w.wait(1)[0]
			requireWhole(t, r)
			assert.Equal(t, "request_body", top(r, stage.Unknown).String(), describe(r))
			assert.Greater(t, r.Exclusive[stage.RequestBody], 60*ms, describe(r))
		})
	}
}

// Whoever accepts, or the thread that it starts for the connection, waits for a CPU: the new connection lay in a queue
// because of that, and not because the server was busy.
func TestANewConnectionThatWaitsForTheServersCPUIsRunQueue(t *testing.T) {
	requireRoot(t)
	for _, shape := range []string{"thread per connection", "event loop"} {
		t.Run(shape, func(t *testing.T) {
			s := startC(t, shape == "event loop")
			w := observe(t, probe.Config{}, s)
			stop := burn(t, s.pid())
			defer stop()
			r := slowOne(t, w, 5*time.Millisecond, func() {
				conn, err := net.Dial("tcp4", s.addr)
				require.NoError(t, err)
				_, err = io.WriteString(conn, "GET / HTTP/1.1\r\nHost: x\r\n\r\n")
				require.NoError(t, err)
				_, err = http.ReadResponse(bufio.NewReader(conn), nil)
				require.NoError(t, err)
				require.NoError(t, conn.Close())
			})
			requireWhole(t, &r)
			assert.Equal(t, "run_queue", top(&r, stage.RunQueue).String(), describe(&r))
			assert.Greater(t, r.Exclusive[stage.RunQueue], int64(r.End-r.Start)/2, describe(&r))
		})
	}
}

// The same where the server is stopped, and where it has used up its CPU limit.
func TestANewConnectionWaitsForWhatHoldsItsServerUp(t *testing.T) {
	requireRoot(t)
	for _, shape := range []string{"thread per connection", "event loop", "goroutines"} {
		t.Run(shape+", stopped", func(t *testing.T) {
			s := startShape(t, shape)
			w := observe(t, probe.Config{}, s)
			s.get("/")
			s.stop()
			time.AfterFunc(delayMS*time.Millisecond, func() { _ = s.cmd.Process.Signal(syscall.SIGCONT) })
			s.get("/")
			r := &w.wait(2)[1]
			requireWhole(t, r)
			assert.Equal(t, "stopped", top(r, stage.Stopped).String(), describe(r))
			assert.Greater(t, float64(r.Exclusive[stage.Stopped]), tolerance*delayMS*float64(ms), describe(r))
			assertOccurrences(t, w.of(r), stage.Stopped, r)
		})
		if shape == "goroutines" {
			continue // which thread takes the goroutine up is open: see docs/kernel.md
		}
		t.Run(shape+", at its CPU limit", func(t *testing.T) {
			s := startShape(t, shape)
			group, v2 := cgroup(t, "cpu", s)
			if v2 {
				t.Skip("needs a version 1 cpu cgroup")
			}
			write := func(name, value string) { require.NoError(t, os.WriteFile(group+"/"+name, []byte(value), 0o644)) }
			write("cpu.cfs_period_us", "100000")
			write("cpu.cfs_quota_us", "5000")
			write("cgroup.procs", strconv.FormatUint(uint64(s.pid()), 10))
			w := observe(t, probe.Config{}, s)
			stop := burnWithin(t, group)
			defer stop()
			r := slowOne(t, w, 40*time.Millisecond, func() { s.get("/") })
			requireWhole(t, &r)
			assert.Equal(t, "throttled", top(&r, stage.Throttled).String(), describe(&r))
			assert.Greater(t, r.Exclusive[stage.Throttled], int64(r.End-r.Start)*6/10, describe(&r))
		})
	}
}

// slowOne asks until a request took the server so long, and returns that one.
func slowOne(t *testing.T, w *watch, atLeast time.Duration, ask func()) assemble.Request {
	t.Helper()
	before := len(w.wait(0))
	for n := before + 1; n <= before+1000; n++ {
		start := time.Now()
		ask()
		if time.Since(start) < atLeast {
			continue
		}
		r := slices.MaxFunc(w.wait(n), func(a, b assemble.Request) int { return cmp.Compare(a.End-a.Start, b.End-b.Start) })
		if r.End-r.Start >= uint64(atLeast) { // else it was the client that waited
			return r
		}
	}
	require.Fail(t, "no request was held up")
	return assemble.Request{}
}

// burnWithin uses up the CPU limit of a cgroup by a process of its own.
func burnWithin(t *testing.T, group string) (stop func()) {
	t.Helper()
	cmd := exec.Command("sh", "-c", "while :; do :; done")
	require.NoError(t, cmd.Start())
	stop = func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	}
	if err := os.WriteFile(group+"/cgroup.procs", []byte(strconv.Itoa(cmd.Process.Pid)), 0o644); err != nil {
		stop()
		require.NoError(t, err)
	}
	return stop
}
