//go:build linux

package kerneltest

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
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
	"unsafe"

	"github.com/cilium/ebpf"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/ebpfllm/ebpfllm/bpf"
	"github.com/ebpfllm/ebpfllm/internal/assemble"
	"github.com/ebpfllm/ebpfllm/internal/cserver"
	"github.com/ebpfllm/ebpfllm/internal/probe"
	"github.com/ebpfllm/ebpfllm/internal/stage"
)

var compileSockets = sync.OnceValues(func() (string, error) {
	out := filepath.Join(os.TempDir(), fmt.Sprintf("ebpfllm-kerneltest-sockets-%d", os.Getpid()))
	return out, cserver.BuildSockets(out)
})

// startSockets starts the server of many kinds of sockets, see internal/cserver.
func startSockets(t *testing.T, mode string) *server {
	t.Helper()
	binary, err := compileSockets()
	require.NoError(t, err)
	s := start(t, func(port string) *exec.Cmd { return exec.Command(binary, mode, port) })
	s.file = binary // not Go
	return s
}

// children lists the server's child processes.
func (s *server) children() (pids []uint32) {
	s.t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", s.pid(), s.pid()))
	require.NoError(s.t, err)
	for f := range strings.FieldsSeq(string(b)) {
		pid, err := strconv.ParseUint(f, 10, 32)
		require.NoError(s.t, err)
		pids = append(pids, uint32(pid))
	}
	return pids
}

// trackChildren watches the processes that the server had started before it was watched.
func (w *watch) trackChildren(s *server) {
	w.t.Helper()
	for _, pid := range s.children() {
		require.NoError(w.t, w.probe.Track(pid, probe.Tracking{}))
	}
}

func (w *watch) counters() probe.Counters {
	w.t.Helper()
	c, err := w.probe.Counters()
	require.NoError(w.t, err)
	return c
}

// awaitUnparsed waits until n messages are counted by the reason.
func (w *watch) awaitUnparsed(reason string, n uint64) {
	w.t.Helper()
	assert.Eventually(w.t, func() bool {
		w.mu.Lock()
		defer w.mu.Unlock()
		return w.unparsed[reason] >= n
	}, 5*time.Second, 10*time.Millisecond, "messages that are counted as %s", reason)
	w.mu.Lock()
	defer w.mu.Unlock()
	assert.Equal(w.t, n, w.unparsed[reason], "%v", w.unparsed)
}

// kernelMap opens a map of the kernel side, which this process holds.
func kernelMap(t *testing.T, name string) *ebpf.Map {
	t.Helper()
	for _, id := range holds(t).maps {
		m, err := ebpf.NewMapFromID(id)
		require.NoError(t, err)
		info, err := m.Info()
		require.NoError(t, err)
		if info.Name == name {
			t.Cleanup(func() { _ = m.Close() })
			return m
		}
		require.NoError(t, m.Close())
	}
	require.Fail(t, "no such map", name)
	return nil
}

// exchange asks once on a connection and returns the length of the answer, its head included.
func exchange(t *testing.T, conn net.Conn, path string) uint64 {
	t.Helper()
	write(t, conn, path)
	return answer(t, conn)
}

func answer(t *testing.T, conn net.Conn) uint64 {
	t.Helper()
	require.NoError(t, conn.SetReadDeadline(time.Now().Add(20*time.Second)))
	var n bytesRead
	r, err := http.ReadResponse(bufio.NewReader(io.TeeReader(conn, &n)), nil)
	require.NoError(t, err)
	_, err = io.Copy(io.Discard, r.Body)
	require.NoError(t, err)
	require.NoError(t, r.Body.Close())
	return uint64(n)
}

func dial(t *testing.T, network, addr string) net.Conn {
	t.Helper()
	conn, err := net.Dial(network, addr)
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	return conn
}

// One socket for both protocols: IPv4 comes as addresses of IPv6.
func TestADualStackServerIsMeasuredOverBoth(t *testing.T) {
	requireRoot(t)
	s := startSockets(t, "dual")
	w := observe(t, probe.Config{}, s)
	for i, host := range []string{"127.0.0.1", "::1"} {
		conn := dial(t, "tcp", net.JoinHostPort(host, strconv.Itoa(int(s.port))))
		n := exchange(t, conn, "/sleep?60")
		r := &w.wait(i + 1)[i]
		requireWhole(t, r)
		assert.Equal(t, "wait", top(r, stage.Wait).String(), describe(r))
		assert.Equal(t, n, r.BytesOut)
		assert.EqualValues(t, unix.AF_INET6, r.Peer.Family)
		assert.Equal(t, host, netip.AddrFrom16(r.Peer.LocalAddr).Unmap().String())
		assert.Equal(t, conn.LocalAddr().(*net.TCPAddr).Port, int(r.Peer.RemotePort))
	}
}

// What is not TCP is not measured, and it is said how many requests that are.
func TestRequestsOverAUnixSocketAreCountedAndNotMeasured(t *testing.T) {
	requireRoot(t)
	s := startSockets(t, "unix")
	w := observe(t, probe.Config{}, s)
	for range 2 {
		conn := dial(t, "unix", fmt.Sprintf("@ebpfllm-sockets-%d", s.port))
		exchange(t, conn, "/")
		exchange(t, conn, "/big?64")
	}
	assert.Equal(t, map[string]uint64{"unix_socket": 4, "mptcp": 0}, w.counters().Unwatched)
	w.mu.Lock()
	defer w.mu.Unlock()
	assert.Zero(t, w.begun)
}

// What a server says to its engine over such a socket is no request.
func TestAnEnginesUnixSocketIsNotCounted(t *testing.T) {
	requireRoot(t)
	s := startC(t, false, "-engine", "unix")
	w := observe(t, probe.Config{}, s)
	w.trackChildren(s)
	s.get("/engine0/cpu?5")
	r := &w.wait(1)[0]
	requireWhole(t, r)
	assert.Equal(t, map[string]uint64{"unix_socket": 0, "mptcp": 0}, w.counters().Unwatched)
}

// A listener with Multipath TCP, such as Go's, takes plain clients too: those are measured.
func TestMultipathTCPIsCountedAndItsPlainClientsAreMeasured(t *testing.T) {
	requireRoot(t)
	if b, err := os.ReadFile("/proc/sys/net/mptcp/enabled"); err != nil || strings.TrimSpace(string(b)) != "1" {
		t.Skip("needs Multipath TCP (CONFIG_MPTCP, net.mptcp.enabled=1): ", string(b), err)
	}
	for _, language := range []string{"C", "Go"} {
		t.Run(language, func(t *testing.T) {
			s := startSockets(t, "mptcp")
			if language == "Go" {
				s = startGo(t)
			}
			w := observe(t, probe.Config{}, s)
			n := exchange(t, dial(t, "tcp4", s.addr), "/")
			r := &w.wait(1)[0]
			requireWhole(t, r)
			assert.Equal(t, n, r.BytesOut)

			var d net.Dialer
			d.SetMultipathTCP(true)
			conn, err := d.DialContext(t.Context(), "tcp4", s.addr)
			require.NoError(t, err)
			defer conn.Close()
			multipath, err := conn.(*net.TCPConn).MultipathTCP()
			require.NoError(t, err)
			require.True(t, multipath, "the connection fell back to plain TCP")
			exchange(t, conn, "/one")
			exchange(t, conn, "/two")
			assert.Equal(t, map[string]uint64{"unix_socket": 0, "mptcp": 2}, w.counters().Unwatched)
			time.Sleep(100 * time.Millisecond) // what was made of them would be here by now
			assert.Len(t, w.wait(1), 1)
		})
	}
}

// Several processes share a port, and the listener of one of them closes: the others' connections are seen on.
func TestWhereSeveralListenOnAPortOneMayClose(t *testing.T) {
	requireRoot(t)
	s := startSockets(t, "reuse")
	w := observe(t, probe.Config{}, s)
	w.trackChildren(s)
	workers := s.children()
	require.Len(t, workers, 2)
	asked := 0
	ask := func() (by map[uint32]int) {
		for range 24 {
			exchange(t, dial(t, "tcp4", s.addr), "/")
			asked++
		}
		by = map[uint32]int{}
		for _, r := range w.wait(asked)[asked-24:] {
			requireWhole(t, &r)
			assert.NotContains(t, r.Missing, stage.AcceptQueue)
			by[r.PID]++
		}
		return by
	}
	by := ask()
	assert.Len(t, by, 2, "the kernel spreads connections over both")
	for pid := range by {
		assert.Contains(t, workers, pid)
	}
	require.NoError(t, syscall.Kill(int(workers[0]), syscall.SIGKILL))
	ports := kernelMap(t, "ports")
	key := bpf.KernelPortKey{Netns: netNS(t, "self"), Port: uint32(s.port)}
	var closed uint32
	require.Eventually(t, func() bool { // the last of its sockets is closed when it ends
		require.NoError(t, ports.Lookup(key, &closed), "the port is dropped, and somebody listens there")
		return closed != 0
	}, 5*time.Second, time.Millisecond)
	assert.Equal(t, map[uint32]int{workers[1]: 24}, ask())

	// user space looks, finds that the port is listened on, and drops those that are not
	require.NoError(t, w.probe.AddPort(key.Netns, s.port))
	require.NoError(t, w.probe.DropPorts())
	require.NoError(t, ports.Lookup(key, &closed))
	require.NoError(t, syscall.Kill(int(workers[1]), syscall.SIGKILL))
	require.Eventually(t, func() bool {
		require.NoError(t, w.probe.DropPorts())
		return ports.Lookup(key, &closed) != nil
	}, 5*time.Second, time.Millisecond, "nobody listens there, and it stays watched")
}

// netNS is the network namespace of a process, or of a named one's file.
func netNS(t *testing.T, who string) uint32 {
	t.Helper()
	path := who
	if !strings.HasPrefix(who, "/") {
		path = "/proc/" + who + "/ns/net"
	}
	var st syscall.Stat_t
	require.NoError(t, syscall.Stat(path, &st))
	return uint32(st.Ino)
}

// Whoever accepts, the request is the process's that reads it.
func TestWorkersShareAListenerOrAreHandedConnections(t *testing.T) {
	requireRoot(t)
	for _, mode := range []string{"prefork", "passed"} {
		t.Run(mode, func(t *testing.T) {
			s := startSockets(t, mode)
			w := observe(t, probe.Config{}, s)
			w.trackChildren(s)
			workers := s.children()
			require.NotEmpty(t, workers)
			const n = 6
			for range n {
				conn := dial(t, "tcp4", s.addr)
				exchange(t, conn, "/")
				exchange(t, conn, "/sleep?20")
			}
			for _, r := range w.wait(2 * n) {
				requireWhole(t, &r)
				assert.Empty(t, r.Missing, describe(&r))
				assert.Contains(t, workers, r.PID)
				if r.Head.Path == "/sleep" {
					assert.Equal(t, "wait", top(&r, stage.Wait).String(), describe(&r))
					assert.Greater(t, float64(r.Exclusive[stage.Wait]), tolerance*float64(20*ms), describe(&r))
				}
			}
		})
	}
}

// However the bytes come to the socket, all of them are counted, and a slow reader holds them back.
func TestAnswersWithoutACopy(t *testing.T) {
	requireRoot(t)
	for _, how := range []string{"big", "sendfile", "splice", "zerocopy"} {
		t.Run(how, func(t *testing.T) {
			s := startSockets(t, "plain")
			w := observe(t, probe.Config{}, s)
			n := exchange(t, dial(t, "tcp4", s.addr), "/"+how+"?64")
			r := &w.wait(1)[0]
			requireWhole(t, r)
			assert.Equal(t, n, r.BytesOut, describe(r))
			assert.Equal(t, 200, r.Status)

			conn := dialSmallWindow(t, s.addr)
			defer conn.Close()
			write(t, conn, "/"+how+"?8192")
			<-time.After(2 * delayMS * time.Millisecond) // the reader's slowness is the fault
			n = answer(t, conn)
			r = &w.wait(2)[1]
			requireWhole(t, r)
			assert.Equal(t, n, r.BytesOut, describe(r))
			assert.Equal(t, "send_buffer", top(r, stage.Unknown).String(), describe(r))
			assert.Greater(t, float64(r.Plain[stage.SendBuffer]), tolerance*2*delayMS*float64(ms), describe(r))
			assertOccurrences(t, w.of(r), stage.SendBuffer, r)
		})
	}
}

// Where the buffer that a call reads into is not known, each request is counted and none is measured.
func TestReadsOfUnknownBuffersAreCountedAndNotMeasured(t *testing.T) {
	requireRoot(t)
	for _, mode := range []string{"recvmmsg", "uring", "worker"} {
		t.Run(mode, func(t *testing.T) {
			requireURing(t, mode)
			s := startSockets(t, mode)
			w := observe(t, probe.Config{}, s)
			for range 2 {
				conn := dial(t, "tcp4", s.addr)
				exchange(t, conn, "/")
				exchange(t, conn, "/sleep?20")
				exchange(t, conn, "/big?64")
			}
			w.awaitUnparsed("buffer_unknown", 6)
			assert.EqualValues(t, 6, w.counters().Unreadable)
			w.mu.Lock()
			defer w.mu.Unlock()
			assert.Zero(t, w.begun)
		})
	}
}

func requireURing(t *testing.T, mode string) {
	t.Helper()
	if mode == "recvmmsg" {
		return
	}
	var p [120]byte // struct io_uring_params
	fd, _, errno := unix.Syscall(unix.SYS_IO_URING_SETUP, 1, uintptr(unsafe.Pointer(&p)), 0)
	if errno != 0 {
		t.Skip("io_uring is not to be had (kernel.io_uring_disabled?): ", errno)
	}
	require.NoError(t, unix.Close(int(fd)))
}

// io_uring receives from one connection while its thread is in a read(2) of another, whose buffer has nothing to do with
// the bytes that came.
func TestTheBufferOfAnotherCallIsNotTaken(t *testing.T) {
	requireRoot(t)
	requireURing(t, "uring")
	s := startSockets(t, "resumed")
	w := observe(t, probe.Config{}, s)
	read, uring := dial(t, "tcp4", s.addr), dial(t, "tcp4", s.addr)
	exchange(t, read, "/stale") // is what lies in the buffer
	for i := range 3 {
		s.asleep() // in read(2), and what io_uring shall do is known to the kernel
		before := w.counters().Unreadable
		write(t, uring, fmt.Sprintf("/true%d", i))
		require.Eventually(t, func() bool { return w.counters().Unreadable > before }, 5*time.Second, time.Millisecond,
			"io_uring has not received, or what was read is taken for its bytes")
		exchange(t, read, fmt.Sprintf("/read%d", i))
		answer(t, uring)
	}
	w.awaitUnparsed("buffer_unknown", 3)
	port := read.LocalAddr().(*net.TCPAddr).Port
	for i, r := range w.wait(4) {
		requireWhole(t, &r)
		assert.EqualValues(t, port, r.Peer.RemotePort, "of the other connection: %s", describe(&r))
		assert.Equal(t, []string{"/stale", "/read0", "/read1", "/read2"}[i], r.Head.Path)
	}
}

// splice(2) takes bytes out of a socket and no hook tells of it: what hangs on when is missing, and not a guess.
func TestABodyThatIsSplicedAwayLeavesItsStagesOut(t *testing.T) {
	requireRoot(t)
	s := startSockets(t, "plain")
	w := observe(t, probe.Config{}, s)
	conn := dial(t, "tcp4", s.addr)
	exchange(t, conn, "/")
	_, err := io.WriteString(conn, "POST /upload?60 HTTP/1.1\r\nHost: x\r\nContent-Length: 8\r\n\r\n")
	require.NoError(t, err)
	for range 2 {
		<-time.After(20 * time.Millisecond)
		_, err = io.WriteString(conn, "body")
		require.NoError(t, err)
	}
	answer(t, conn)
	exchange(t, conn, "/sleep?20")
	all := w.wait(3)
	r := &all[1]
	requireWhole(t, r)
	assert.Subset(t, r.Missing, []stage.Stage{stage.Wait, stage.ReceiveQueue}, describe(r))
	assert.Greater(t, float64(r.Exclusive[stage.Unattributed]), tolerance*float64(80*ms), describe(r))
	assert.Less(t, r.Exclusive[stage.Syscall], 10*ms, "splice(2) of a socket waits for a peer as read(2) does: "+describe(r))
	// what has a span is known: that the first of the bytes were waited for
	assertNoMoreThanTheTotals(t, w.of(r), r)
	assert.LessOrEqual(t, r.Exclusive[stage.RequestBody], 40*ms, describe(r))
	r = &all[2]
	requireWhole(t, r)
	assert.Empty(t, r.Missing, "the next one is read by read(2)")
	assert.Equal(t, "wait", top(r, stage.Wait).String(), describe(r))
}

func TestConnectionsThatAreClosedInHalfOrReset(t *testing.T) {
	requireRoot(t)
	get := func(path string) string { return "GET " + path + " HTTP/1.1\r\nHost: x\r\n\r\n" }
	reset := func(t *testing.T, conn net.Conn) {
		t.Helper()
		require.NoError(t, conn.(*net.TCPConn).SetLinger(0))
		require.NoError(t, conn.Close())
	}
	t.Run("the client has said all it will", func(t *testing.T) {
		s := startSockets(t, "plain")
		w := observe(t, probe.Config{}, s)
		for i, together := range []bool{true, false} {
			conn := dial(t, "tcp4", s.addr)
			_, err := io.WriteString(conn, get("/sleep?60"))
			require.NoError(t, err)
			if !together { // the FIN finds the request read already
				w.awaitBegun(i + 1)
			}
			require.NoError(t, conn.(*net.TCPConn).CloseWrite())
			n := answer(t, conn)
			r := &w.wait(i + 1)[i]
			requireWhole(t, r)
			assert.Equal(t, n, r.BytesOut)
			assert.Equal(t, "wait", top(r, stage.Wait).String(), describe(r))
			assert.Less(t, r.Exclusive[stage.RequestBody]+r.Exclusive[stage.ReceiveQueue], 20*ms, "a FIN is no byte to wait for: "+describe(r))
		}
	})
	t.Run("the server shuts its side after the answer", func(t *testing.T) {
		s := startSockets(t, "plain")
		w := observe(t, probe.Config{}, s)
		conn := dial(t, "tcp4", s.addr)
		n := exchange(t, conn, "/half")
		_, _ = io.WriteString(conn, get("/after")) // nobody can answer it any more
		_, err := conn.Read(make([]byte, 1))
		require.ErrorIs(t, err, io.EOF)
		require.NoError(t, conn.Close())
		all := w.wait(2)
		requireWhole(t, &all[0])
		assert.Equal(t, n, all[0].BytesOut)
		assert.Equal(t, []string{assemble.IncompleteAborted}, all[1].Incomplete, describe(&all[1]))
		assert.Zero(t, all[1].BytesOut)
	})
	t.Run("reset before the answer", func(t *testing.T) {
		s := startSockets(t, "plain")
		w := observe(t, probe.Config{}, s)
		conn := dial(t, "tcp4", s.addr)
		_, err := io.WriteString(conn, get("/sleep?100"))
		require.NoError(t, err)
		w.awaitBegun(1)
		reset(t, conn)
		r := &w.wait(1)[0]
		assert.Contains(t, r.Incomplete, assemble.IncompleteAborted, describe(r))
		assert.Zero(t, r.BytesOut)
		assert.Less(t, int64(r.End-r.Start), 90*ms, "it ends with the connection: "+describe(r))
	})
	t.Run("reset before it is read", func(t *testing.T) {
		for _, shape := range []string{"thread per connection", "goroutines"} {
			s := startSockets(t, "plain")
			if shape == "goroutines" {
				s = startGo(t)
			}
			w := observe(t, probe.Config{}, s)
			kept := dial(t, "tcp4", s.addr)
			exchange(t, kept, "/")
			gone := func(conn net.Conn) {
				s.stop()
				_, err := io.WriteString(conn, get("/gone"))
				require.NoError(t, err)
				<-time.After(delayMS * time.Millisecond)
				reset(t, conn)
				require.Eventually(t, func() bool { return established(t, s.port) == 0 }, 5*time.Second, time.Millisecond)
				require.NoError(t, s.cmd.Process.Signal(syscall.SIGCONT))
			}
			gone(kept)
			w.wait(2)
			fresh := dial(t, "tcp4", s.addr)
			require.Eventually(t, func() bool { return s.sockets() == 2 }, 5*time.Second, time.Millisecond, "it is not accepted")
			gone(fresh)
			for _, r := range w.wait(3)[1:] {
				assert.Equal(t, "/gone", r.Head.Path)
				assert.Equal(t, []string{assemble.IncompleteAborted}, r.Incomplete, "%s: %s", shape, describe(&r))
				assert.Empty(t, r.Refused)
				assert.Equal(t, "stopped", top(&r, stage.Stopped).String(), describe(&r))
				assert.Zero(t, r.BytesOut)
			}
		}
	})
	t.Run("reset in the midst of its head", func(t *testing.T) {
		s := startSockets(t, "plain")
		w := observe(t, probe.Config{}, s)
		conn := dial(t, "tcp4", s.addr)
		_, err := io.WriteString(conn, "GET /half-a-head HTT")
		require.NoError(t, err)
		s.asleep()
		require.Eventually(t, func() bool { return w.counters().Records["request_head"] == 1 }, 5*time.Second, time.Millisecond)
		reset(t, conn)
		w.awaitUnparsed("head_incomplete", 1)
		w.mu.Lock()
		defer w.mu.Unlock()
		assert.Zero(t, w.begun)
	})
	t.Run("reset after a whole answer", func(t *testing.T) {
		s := startSockets(t, "plain")
		w := observe(t, probe.Config{}, s)
		conn := dial(t, "tcp4", s.addr)
		exchange(t, conn, "/")
		reset(t, conn)
		requireWhole(t, &w.wait(1)[0])
	})
}

// A client whose SYN finds the queue full is dropped and tries again a second later. Of that second the server's
// kernel knows nothing: the request begins when its bytes come. Those that waited in the queue are told so.
func TestAClientThatFoundTheAcceptQueueFullBeginsWhenItsBytesCome(t *testing.T) {
	requireRoot(t)
	s := startSockets(t, "short")
	w := observe(t, probe.Config{}, s)
	overflows := func() int64 { return netstat(t, "ListenOverflows") + netstat(t, "ListenDrops") }
	before := overflows()
	for range 2 { // the queue holds one more than it was told
		write(t, dial(t, "tcp4", s.addr), "/")
	}
	dialled := make(chan time.Duration, 1)
	begin := time.Now()
	go func() {
		conn, err := net.Dial("tcp4", s.addr)
		if err == nil {
			defer conn.Close()
			_, err = io.WriteString(conn, "GET /late HTTP/1.1\r\nHost: x\r\n\r\n")
		}
		if err == nil {
			_, err = http.ReadResponse(bufio.NewReader(conn), nil)
		}
		if err != nil {
			t.Error(err)
		}
		dialled <- time.Since(begin)
	}()
	require.Eventually(t, func() bool { return overflows() > before }, 5*time.Second, time.Millisecond, "no SYN was dropped")
	<-time.After(100 * time.Millisecond)
	require.NoError(t, s.cmd.Process.Signal(syscall.SIGUSR1))
	took := <-dialled
	require.Greater(t, took, 900*time.Millisecond, "the SYN was not tried again")
	late := 0
	for _, r := range w.wait(3) {
		requireWhole(t, &r)
		if r.Head.Path == "/late" {
			late++
			assert.Less(t, int64(r.End-r.Start), took.Nanoseconds()/2, "what its SYN waited is not the server's to tell: "+describe(&r))
			assert.Less(t, r.Exclusive[stage.AcceptQueue], 100*ms, describe(&r))
			continue
		}
		assert.Equal(t, "accept_queue", top(&r, stage.AcceptQueue).String(), describe(&r))
		assert.Greater(t, float64(r.Exclusive[stage.AcceptQueue]), tolerance*float64(100*ms), describe(&r))
	}
	assert.Equal(t, 1, late)
}

// established counts the connections to a port of IPv4 that are neither closed nor closing.
func established(t *testing.T, port uint16) (n int) {
	t.Helper()
	b, err := os.ReadFile("/proc/net/tcp")
	require.NoError(t, err)
	for line := range strings.Lines(string(b)) {
		f := strings.Fields(line)
		if len(f) > 3 && strings.HasSuffix(f[1], fmt.Sprintf(":%04X", port)) && f[3] == "01" {
			n++
		}
	}
	return n
}

// sockets counts those that the server holds.
func (s *server) sockets() (n int) {
	s.t.Helper()
	files, err := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", s.pid()))
	require.NoError(s.t, err)
	for _, f := range files {
		if to, err := os.Readlink(f); err == nil && strings.HasPrefix(to, "socket:") {
			n++
		}
	}
	return n
}

// netstat reads a counter of TCP of this network.
func netstat(t *testing.T, name string) int64 {
	t.Helper()
	b, err := os.ReadFile("/proc/net/netstat")
	require.NoError(t, err)
	lines := strings.Split(string(b), "\n")
	for i := 0; i+1 < len(lines); i += 2 {
		if at := slices.Index(strings.Fields(lines[i]), name); at >= 0 {
			n, err := strconv.ParseInt(strings.Fields(lines[i+1])[at], 10, 64)
			require.NoError(t, err)
			return n
		}
	}
	require.Fail(t, "no such counter", name)
	return 0
}
