//go:build linux

package kerneltest

import (
	"bufio"
	"io"
	"net"
	"net/http"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/ebpfllm/ebpfllm/internal/assemble"
	"github.com/ebpfllm/ebpfllm/internal/probe"
	"github.com/ebpfllm/ebpfllm/internal/stage"
)

// dial connects, and has the server accept and read the connection.
func (s *server) dial() net.Conn {
	s.t.Helper()
	conn, err := net.Dial("tcp4", s.addr)
	require.NoError(s.t, err)
	s.t.Cleanup(func() { _ = conn.Close() })
	write(s.t, conn, "/")
	answered(s.t, conn)
	return conn
}

func write(t *testing.T, conn net.Conn, path string) {
	t.Helper()
	_, err := io.WriteString(conn, "GET "+path+" HTTP/1.1\r\nHost: x\r\n\r\n")
	require.NoError(t, err)
}

// answered reads one answer of the server.
func answered(t *testing.T, conn net.Conn) {
	t.Helper()
	answer, err := http.ReadResponse(bufio.NewReader(conn), nil)
	require.NoError(t, err)
	_, err = io.Copy(io.Discard, answer.Body)
	require.NoError(t, err)
}

// stall is the longest occurrence of a stage of a request.
func (w *watch) stall(r *assemble.Request, s stage.Stage) assemble.Occurrence {
	var longest assemble.Occurrence
	for _, o := range w.of(r) {
		if o.Stage == s && o.Duration > longest.Duration {
			longest = o
		}
	}
	return longest
}

// assertShared checks that the same stall was told to each of the requests and
// to no other one, and that each telling names the others.
func assertShared(t *testing.T, w *watch, all []assemble.Request, s stage.Stage, keys []assemble.Key) {
	t.Helper()
	for i := range all {
		r := &all[i]
		o := w.stall(r, s)
		if !slices.Contains(keys, r.Key) {
			assert.Less(t, o.Duration, 20*ms, "not a request that was delayed: %s", describe(r))
			continue
		}
		assert.Greater(t, float64(o.Duration), tolerance*float64(delayMS*ms)/2, describe(r))
		assert.Equal(t, len(keys), o.SharedBy, "%v of %s", o, describe(r))
		assert.ElementsMatch(t, keys, append([]assemble.Key{r.Key}, o.Others...))
		assert.Empty(t, r.Incomplete)
	}
}

func TestAStallOfAnEventLoopIsSharedByThoseInFlight(t *testing.T) {
	requireRoot(t)
	for _, f := range []fault{
		{name: "a contended mutex", path: "/lock?60", want: stage.Lock},
		{name: "a cold buffered read", path: "/read", want: stage.PageCache},
	} {
		t.Run(f.name, func(t *testing.T) {
			s := startC(t, true)
			w := observe(t, probe.Config{}, s)
			one, two, blocks := s.dial(), s.dial(), s.dial() // each ends before the stall
			write(t, one, "/defer?500")
			write(t, two, "/defer?500")
			w.awaitBegun(5)
			if f.want == stage.PageCache {
				s.evict()
			}
			write(t, blocks, f.path)
			answered(t, blocks)
			s.get("/") // begins after it
			answered(t, one)
			answered(t, two)
			all := w.wait(7)
			byPath := map[string][]assemble.Key{}
			var longest int64
			for i := range all {
				byPath[all[i].Head.Path] = append(byPath[all[i].Head.Path], all[i].Key)
				longest = max(longest, w.stall(&all[i], f.want).Duration)
			}
			path, _, _ := strings.Cut(f.path, "?")
			require.Len(t, byPath["/defer"], 2)
			require.Len(t, byPath[path], 1)
			delayed := slices.Concat(byPath["/defer"], byPath[path])
			if f.want == stage.Lock {
				assertShared(t, w, all, f.want, delayed)
				return
			}
			// a read of many pieces: each is told to all three
			require.Positive(t, longest, "nothing of the read was cold")
			for i := range all {
				for _, o := range w.of(&all[i]) {
					if o.Stage == f.want {
						assert.Equal(t, 3, o.SharedBy)
						assert.ElementsMatch(t, delayed, append([]assemble.Key{all[i].Key}, o.Others...))
					}
				}
			}
		})
	}
}

// Those that lie unread are not on the thread yet, and are delayed all the same.
func TestAStallIsSharedWithThoseThatAreNotReadYet(t *testing.T) {
	requireRoot(t)
	s := startC(t, true)
	w := observe(t, probe.Config{}, s)
	inFlight, one, two := s.dial(), s.dial(), s.dial()
	write(t, inFlight, "/defer?300")
	w.awaitBegun(4)
	s.stop()
	write(t, one, "/")
	write(t, two, "/")
	<-time.After(delayMS * time.Millisecond) // the fault itself
	require.NoError(t, s.cmd.Process.Signal(syscall.SIGCONT))
	answered(t, one)
	answered(t, two)
	answered(t, inFlight)
	all := w.wait(6)
	var delayed []assemble.Key
	for i := range all {
		if all[i].Seq == 2 {
			delayed = append(delayed, all[i].Key)
		}
	}
	require.Len(t, delayed, 3)
	assertShared(t, w, all, stage.Stopped, delayed)
}

// A stage of the socket is its own request's alone, whatever else its thread does.
func TestASlowReaderOfAnEventLoopDelaysNobodyElseBySendBuffer(t *testing.T) {
	requireRoot(t)
	s := startC(t, true)
	w := observe(t, probe.Config{}, s)
	other := s.dial()
	write(t, other, "/defer?400")
	w.awaitBegun(2)
	conn := dialSmallWindow(t, s.addr)
	defer conn.Close()
	_, err := io.WriteString(conn, "GET /big?2048 HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
	require.NoError(t, err)
	<-time.After(2 * delayMS * time.Millisecond) // the reader's slowness is the fault
	_, err = io.CopyN(io.Discard, conn, 2048<<10)
	require.NoError(t, err)
	answered(t, other)
	all := w.wait(3)
	for i := range all {
		for _, o := range w.of(&all[i]) {
			if o.Stage == stage.SendBuffer {
				assert.Equal(t, "/big", all[i].Head.Path)
				assert.Equal(t, 1, o.SharedBy)
				assert.Empty(t, o.Others)
			}
		}
	}
}
