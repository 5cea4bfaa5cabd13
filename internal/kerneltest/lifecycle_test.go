//go:build linux

package kerneltest

import (
	"bufio"
	"cmp"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/link"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.uber.org/goleak"
	"go.uber.org/zap"
	"golang.org/x/sys/unix"

	"github.com/ebpfllm/ebpfllm/internal/assemble"
	"github.com/ebpfllm/ebpfllm/internal/probe"
	"github.com/ebpfllm/ebpfllm/internal/stage"
)

// held are the kernel's programs, maps and links that a process holds, by id.
type held struct {
	programs []ebpf.ProgramID
	maps     []ebpf.MapID
	links    []link.ID
}

func holds(t *testing.T) held {
	t.Helper()
	return heldBy(t, "self")
}

func heldBy(t *testing.T, pid string) (h held) {
	t.Helper()
	infos, err := filepath.Glob("/proc/" + pid + "/fdinfo/*")
	require.NoError(t, err)
	for _, info := range infos {
		b, err := os.ReadFile(info)
		if err != nil {
			continue // closed meanwhile
		}
		for line := range strings.Lines(string(b)) {
			var id uint32
			if n, _ := fmt.Sscanf(line, "prog_id: %d", &id); n == 1 {
				h.programs = append(h.programs, ebpf.ProgramID(id))
			}
			if n, _ := fmt.Sscanf(line, "map_id: %d", &id); n == 1 {
				h.maps = append(h.maps, ebpf.MapID(id))
			}
			if n, _ := fmt.Sscanf(line, "link_id: %d", &id); n == 1 {
				h.links = append(h.links, link.ID(id))
			}
		}
	}
	return h
}

// left counts those of them that the kernel still has.
func (h held) left() (n int) {
	for _, id := range h.programs {
		if p, err := ebpf.NewProgramFromID(id); err == nil {
			n++
			_ = p.Close()
		}
	}
	for _, id := range h.maps {
		if m, err := ebpf.NewMapFromID(id); err == nil {
			n++
			_ = m.Close()
		}
	}
	for _, id := range h.links {
		if l, err := link.NewFromID(id); err == nil {
			n++
			_ = l.Close()
		}
	}
	return n
}

func openFiles(t *testing.T) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	require.NoError(t, err)
	return len(entries)
}

func TestCloseLeavesNothingBehind(t *testing.T) {
	requireRoot(t)
	s := startGo(t)
	files := openFiles(t)
	for range 2 {
		p, err := probe.New(probe.Config{RingBytes: 1 << 16, MinDuration: time.Millisecond}, zap.NewNop())
		require.NoError(t, err)
		require.NoError(t, p.Track(s.pid(), probe.Tracking{IsGo: true, GoOffset: -8}))
		ours := holds(t)
		assert.Greater(t, len(ours.programs), 15)
		assert.Greater(t, len(ours.maps), 8)
		ctx, cancel := context.WithCancel(t.Context())
		done := make(chan error)
		go func() { done <- p.Run(ctx, func(probe.Event) {}) }()
		cancel()
		require.NoError(t, <-done)
		require.NoError(t, p.Close())
		require.NoError(t, p.Close(), "twice is once")
		assert.ErrorIs(t, p.Track(s.pid(), probe.Tracking{}), os.ErrClosed)
		// the kernel frees them after a grace period
		assert.Eventually(t, func() bool { return ours.left() == 0 }, 5*time.Second, 20*time.Millisecond)
	}
	assert.Equal(t, files, openFiles(t))
	goleak.VerifyNone(t, goleak.IgnoreTopFunction("os/exec.(*Cmd).watchCtx"))
}

// switches counts how often the program at context switches ran in 20 ms: one
// that is loaded but attached nowhere does not run.
func switches(t *testing.T, w *watch) uint64 {
	t.Helper()
	stats, err := ebpf.EnableStats(unix.BPF_STATS_RUN_TIME)
	require.NoError(t, err)
	defer stats.Close()
	before := w.probe.Runs()["sched_switch"].Count
	for range 20 {
		<-time.After(time.Millisecond)
	}
	return w.probe.Runs()["sched_switch"].Count - before
}

func TestHotHooksAreDetachedWithoutATarget(t *testing.T) {
	requireRoot(t)
	s := startGo(t)
	w := observe(t, probe.Config{}, s)
	assert.Positive(t, switches(t, w))
	require.NoError(t, w.probe.Untrack(s.pid()))
	assert.Zero(t, switches(t, w))
	require.NoError(t, w.probe.Track(s.pid(), probe.Tracking{Candidate: true}))
	assert.Zero(t, switches(t, w), "a candidate needs no scheduler hooks")
	require.NoError(t, w.probe.Track(s.pid(), probe.Tracking{IsGo: true, GoOffset: -8}))
	assert.Positive(t, switches(t, w))
	require.NoError(t, s.cmd.Process.Kill())
	assert.Eventually(t, func() bool { return switches(t, w) == 0 }, 5*time.Second, 20*time.Millisecond, "the last target has ended")
}

func TestAFullRingIsCountedAndMarksTheRequest(t *testing.T) {
	requireRoot(t)
	s := startGo(t)
	w := observe(t, probe.Config{RingBytes: 4096}, s)
	conn, err := net.Dial("tcp4", s.addr)
	require.NoError(t, err)
	defer conn.Close()
	in := bufio.NewReader(conn)
	// more records between two polls than a page holds
	for range 200 {
		_, err := io.WriteString(conn, "GET / HTTP/1.1\r\nHost: x\r\n\r\n")
		require.NoError(t, err)
		r, err := http.ReadResponse(in, nil)
		require.NoError(t, err)
		_, err = io.Copy(io.Discard, r.Body)
		require.NoError(t, err)
	}
	finished := w.wait(2)
	c, err := w.probe.Counters()
	require.NoError(t, err)
	var lost uint64
	for _, n := range c.Lost {
		lost += n
	}
	assert.Positive(t, lost)
	for _, r := range finished {
		if r.Refused == "" && r.Incomplete == nil {
			assert.NotZero(t, r.Status, "what is said to be whole is whole: %s", describe(&r))
		}
	}
}

func TestStagesThatAreOffAreMissingAndNotZero(t *testing.T) {
	requireRoot(t)
	s := startC(t, false)
	w := observe(t, probe.Config{Disabled: []stage.Stage{stage.PageFault, stage.AcceptQueue}}, s)
	for _, r := range w.probe.Report() {
		off := r.Stage == stage.PageFault || r.Stage == stage.AcceptQueue
		assert.Equal(t, !off, r.Available, "%+v", r)
		assert.Equal(t, off, r.Hook == "", "%+v", r)
		assert.Equal(t, off, r.Reason != "", "%+v", r)
	}
	s.get("/map")
	r := &w.wait(1)[0]
	requireWhole(t, r)
	assert.Equal(t, []stage.Stage{stage.PageFault, stage.AcceptQueue}, r.Missing)
	assert.Zero(t, r.Exclusive[stage.PageFault])
}

// Another user than root needs two capabilities to load and attach everything, and
// where one is missing the error names it. The child is this test itself.
func TestTwoCapabilitiesAreEnoughAndAMissingOneIsNamed(t *testing.T) {
	const wantEnv = "EBPFLLM_KERNELTEST_WITHOUT"
	if want, ok := os.LookupEnv(wantEnv); ok {
		p, err := probe.New(probe.Config{RingBytes: 4096}, zap.NewNop())
		if want != "" {
			require.ErrorContains(t, err, "missing "+want+":")
			require.ErrorContains(t, err, "setcap")
			return
		}
		require.NoError(t, err)
		assert.Empty(t, p.Unavailable(), "%+v", p.Report())
		require.NoError(t, p.Track(uint32(os.Getpid()), probe.Tracking{}))
		require.NoError(t, p.Close())
		return
	}
	requireRoot(t)
	// a place that this user can enter and the binary it can read
	dir, err := os.MkdirTemp("/tmp", "kerneltest") //nolint:usetesting // that user cannot enter t.TempDir
	require.NoError(t, err)
	defer os.RemoveAll(dir)
	require.NoError(t, os.Chmod(dir, 0o755))
	binary, err := os.ReadFile(os.Args[0])
	require.NoError(t, err)
	require.NoError(t, os.WriteFile(dir+"/test", binary, 0o755))
	for _, tt := range []struct {
		capabilities []uintptr
		missing      string
	}{
		{nil, "CAP_BPF and CAP_PERFMON"},
		{[]uintptr{unix.CAP_BPF}, "CAP_PERFMON"},
		{[]uintptr{unix.CAP_PERFMON}, "CAP_BPF"},
		{[]uintptr{unix.CAP_BPF, unix.CAP_PERFMON}, ""},
	} {
		t.Run("without "+cmp.Or(tt.missing, "anything else"), func(t *testing.T) {
			cmd := exec.Command(dir+"/test", "-test.run", "^TestTwoCapabilitiesAreEnoughAndAMissingOneIsNamed$", "-test.v")
			cmd.Dir = dir
			cmd.Env = append(os.Environ(), wantEnv+"="+tt.missing)
			cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}, AmbientCaps: tt.capabilities}
			out, err := cmd.CombinedOutput()
			require.NoError(t, err, "%s", out)
			assert.Contains(t, string(out), "--- PASS")
		})
	}
}

func TestThreadsAndProcessesThatComeLaterAreWatched(t *testing.T) {
	requireRoot(t)
	binary, err := compile()
	require.NoError(t, err)
	// a shell that becomes the server's parent after it is tracked
	shell := exec.Command("sh", "-c", `read line; "$0" "$1" /dev/null & wait`, binary, "18997")
	in, err := shell.StdinPipe()
	require.NoError(t, err)
	out, err := shell.StdoutPipe()
	require.NoError(t, err)
	shell.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	require.NoError(t, shell.Start())
	defer func() {
		_ = syscall.Kill(-shell.Process.Pid, syscall.SIGKILL)
		_ = shell.Wait()
	}()
	w := observe(t, probe.Config{})
	require.NoError(t, w.probe.Track(uint32(shell.Process.Pid), probe.Tracking{}))
	_, err = io.WriteString(in, "go\n")
	require.NoError(t, err)
	line, err := bufio.NewReader(out).ReadString('\n')
	require.NoError(t, err)
	require.Equal(t, "ready\n", line)
	s := &server{t: t, addr: "127.0.0.1:18997"}
	s.get("/lock?20")
	r := &w.wait(1)[0]
	requireWhole(t, r)
	assert.Equal(t, "lock", top(r, stage.Unknown).String(), describe(r))
	assert.NotEqual(t, uint32(shell.Process.Pid), r.PID)
}

func TestGoroutines(t *testing.T) {
	requireRoot(t)
	lock := t.TempDir() + "/lock"
	s := startGo(t, "LOCK="+lock)
	w := observe(t, probe.Config{}, s)
	s.get("/")

	t.Run("a held flock is lock", func(t *testing.T) {
		f, err := os.OpenFile(lock, os.O_RDWR|os.O_CREATE, 0o600)
		require.NoError(t, err)
		require.NoError(t, syscall.Flock(int(f.Fd()), syscall.LOCK_EX))
		release := time.AfterFunc(delayMS*time.Millisecond, func() { _ = f.Close() })
		defer release.Stop()
		s.get("/flock")
		r := &w.wait(2)[1]
		requireWhole(t, r)
		assert.Equal(t, "lock", top(r, stage.Unknown).String(), describe(r))
		assert.Greater(t, float64(r.Exclusive[stage.Lock]), tolerance*delayMS*float64(ms), describe(r))
		assertOccurrences(t, w.of(r), stage.Lock, r)
	})
	t.Run("a goroutine on no thread stops with its process", func(t *testing.T) {
		s.getWhile("/stream?40", s.pause) // Go's own threads sleep now and then: stopAndGo would stop it at any time
		r := &w.wait(3)[2]
		requireWhole(t, r)
		assert.Greater(t, float64(r.Exclusive[stage.Stopped]), tolerance*delayMS*float64(ms), describe(r))
		assert.Equal(t, 40, r.Chunks)
		assert.Equal(t, 39, r.Gaps.N)
		assert.True(t, r.Streaming)
		assert.GreaterOrEqual(t, r.Gaps.Max, delayMS*ms*8/10)
		assert.Less(t, r.Gaps.P50, 20*ms)
	})
	t.Run("others' waiting is not the request's", func(t *testing.T) {
		slow := make(chan struct{})
		go func() { s.get("/sleep?80"); close(slow) }()
		s.get("/")
		<-slow
		for _, r := range w.wait(5)[3:] {
			requireWhole(t, &r)
			assert.Equal(t, 1, r.SharedBy, "each goroutine is its own")
			if r.Head.Path == "/" {
				assert.Less(t, int64(r.End-r.Start), 70*ms, describe(&r))
			} else {
				assert.Equal(t, "wait", top(&r, stage.Unknown).String(), describe(&r))
			}
		}
	})
}

// What net/http does on a real connection, over IPv6 as well.
func TestMessagesOfGo(t *testing.T) {
	requireRoot(t)
	for _, host := range []string{"127.0.0.1", "[::1]"} {
		t.Run(host, func(t *testing.T) {
			s := startGoOn(t, host)
			w := observe(t, probe.Config{}, s)
			client := http.Client{Transport: &http.Transport{ExpectContinueTimeout: 10 * time.Second}}
			defer client.CloseIdleConnections()
			do := func(method, path, body string, header ...string) {
				t.Helper()
				r, err := http.NewRequestWithContext(t.Context(), method, "http://"+s.addr+path, strings.NewReader(body))
				require.NoError(t, err)
				for i := 0; i < len(header); i += 2 {
					r.Header.Set(header[i], header[i+1])
				}
				response, err := client.Do(r)
				require.NoError(t, err)
				_, err = io.Copy(io.Discard, response.Body)
				require.NoError(t, err)
				require.NoError(t, response.Body.Close())
			}
			do("HEAD", "/head", "")
			do("POST", "/continue", "body", "Expect", "100-continue")
			do("POST", "/long", strings.Repeat("b", 300_000))
			do("GET", "/stream?5", "")
			do("GET", "/nothing", "")
			for i, r := range w.wait(5) {
				requireWhole(t, &r)
				assert.Equal(t, 200, r.Status)
				assert.Equal(t, []string{"/head", "/continue", "/long", "/stream", "/nothing"}[i], r.Head.Path)
				assert.Equal(t, s.port, r.Peer.LocalPort)
				assert.NotZero(t, r.Peer.RemotePort)
				assert.EqualValues(t, map[string]int{"127.0.0.1": unix.AF_INET, "[::1]": unix.AF_INET6}[host], r.Peer.Family)
			}
		})
	}
}

// HTTP as it comes: each case is what a client writes, and what must be made of
// it.
func TestMessages(t *testing.T) {
	requireRoot(t)
	s := startC(t, false)
	w := observe(t, probe.Config{}, s)
	traceparent := "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
	// exchange writes the pieces, waits for n responses, and returns the requests made of them
	exchange := func(t *testing.T, n int, pieces ...string) []assemble.Request {
		t.Helper()
		w.mu.Lock()
		before := len(w.finished)
		w.mu.Unlock()
		conn, err := net.Dial("tcp4", s.addr)
		require.NoError(t, err)
		defer conn.Close()
		in := bufio.NewReader(conn)
		for _, p := range pieces {
			_, err := io.WriteString(conn, p)
			require.NoError(t, err)
			<-time.After(5 * time.Millisecond) // a segment of its own
		}
		for range n {
			r, err := http.ReadResponse(in, nil)
			require.NoError(t, err)
			_, err = io.Copy(io.Discard, r.Body)
			require.NoError(t, err)
		}
		return w.wait(before + max(n, 1))[before:]
	}
	t.Run("a traceparent in any case", func(t *testing.T) {
		r := exchange(t, 1, "GET / HTTP/1.1\r\nHost: x\r\nTRACEPARENT: "+traceparent+"\r\n\r\n")[0]
		requireWhole(t, &r)
		assert.Equal(t, traceparent, r.Head.TraceParent)
	})
	t.Run("a head in pieces, the blank line itself cut", func(t *testing.T) {
		r := exchange(t, 1, "GET /pieces?secret HT", "TP/1.1\r\nHost: x\r\ntraceparent: "+traceparent+"\r", "\n\r", "\n")[0]
		requireWhole(t, &r)
		assert.Equal(t, "/pieces", r.Head.Path)
		assert.Equal(t, traceparent, r.Head.TraceParent)
		assert.Greater(t, r.Exclusive[stage.RequestBody], atLeast(10*ms), "the client was slow: "+describe(&r))
	})
	t.Run("a body in the head's segment", func(t *testing.T) {
		r := exchange(t, 1, "POST /body HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\nabcde")[0]
		requireWhole(t, &r)
		assert.Equal(t, "POST", r.Head.Method)
	})
	t.Run("kept alive", func(t *testing.T) {
		conn, err := net.Dial("tcp4", s.addr)
		require.NoError(t, err)
		defer conn.Close()
		w.mu.Lock()
		before := len(w.finished)
		w.mu.Unlock()
		in := bufio.NewReader(conn)
		for i := range 5 {
			fmt.Fprintf(conn, "GET /n%d HTTP/1.1\r\nHost: x\r\n\r\n", i)
			r, err := http.ReadResponse(in, nil)
			require.NoError(t, err)
			_, err = io.Copy(io.Discard, r.Body)
			require.NoError(t, err)
		}
		for i, r := range w.wait(before + 5)[before:] {
			requireWhole(t, &r)
			assert.Equal(t, fmt.Sprintf("/n%d", i), r.Head.Path)
			assert.EqualValues(t, i+1, r.Seq)
			assert.NotZero(t, r.FirstChunk)
		}
	})
	t.Run("chunked, to its terminator", func(t *testing.T) {
		r := exchange(t, 1, "GET /stream?7 HTTP/1.1\r\nHost: x\r\n\r\n")[0]
		requireWhole(t, &r)
		assert.True(t, r.Streaming)
		assert.GreaterOrEqual(t, r.Chunks, 7)
	})
	t.Run("pipelined", func(t *testing.T) {
		get := "GET /p HTTP/1.1\r\nHost: x\r\n\r\n"
		r := exchange(t, 0, get+get)[0]
		assert.Equal(t, assemble.RefusedPipelined, r.Refused)
		assert.Eventually(t, func() bool { // counted with the next tick
			w.mu.Lock()
			defer w.mu.Unlock()
			return w.unparsed["pipelined"] > 0
		}, 5*time.Second, 10*time.Millisecond)
	})
	t.Run("a client that goes away", func(t *testing.T) {
		w.mu.Lock()
		before := len(w.finished)
		w.mu.Unlock()
		conn := dialSmallWindow(t, s.addr)
		_, err := io.WriteString(conn, "GET /big?4096 HTTP/1.1\r\nHost: x\r\n\r\n")
		require.NoError(t, err)
		_, err = io.ReadFull(conn, make([]byte, 100))
		require.NoError(t, err)
		require.NoError(t, conn.Close())
		r := w.wait(before + 1)[before]
		assert.Equal(t, []string{assemble.IncompleteAborted}, r.Incomplete, describe(&r))
		assert.Equal(t, 200, r.Status)
	})
	t.Run("not HTTP", func(t *testing.T) {
		conn, err := net.Dial("tcp4", s.addr)
		require.NoError(t, err)
		_, err = io.WriteString(conn, "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 hello\r\n\r\n")
		require.NoError(t, err)
		require.Eventually(t, func() bool {
			w.mu.Lock()
			defer w.mu.Unlock()
			return w.unparsed["request_malformed"] == 1
		}, 5*time.Second, 10*time.Millisecond)
		require.NoError(t, conn.Close())
		r := exchange(t, 1, "GET /after HTTP/1.1\r\nHost: x\r\n\r\n")[0]
		requireWhole(t, &r)
	})
	t.Run("a head longer than what is copied", func(t *testing.T) {
		r := exchange(t, 1, "GET /long HTTP/1.1\r\nHost: x\r\nCookie: "+strings.Repeat("c", 5000)+"\r\n\r\n")[0]
		assert.Equal(t, []string{assemble.IncompleteHead}, r.Incomplete, describe(&r))
		assert.Equal(t, "/long", r.Head.Path)
	})
}
