//go:build linux

package kerneltest

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/ebpfllm/ebpfllm/internal/assemble"
	"github.com/ebpfllm/ebpfllm/internal/probe"
	"github.com/ebpfllm/ebpfllm/internal/stage"
)

// assertNoMoreThanTheTotals checks that the spans of a request tell of no stage for
// longer than the request's total says, and never of two at one time.
func assertNoMoreThanTheTotals(t *testing.T, list []assemble.Occurrence, r *assemble.Request) {
	t.Helper()
	var told stage.Times
	for i, o := range list {
		told[o.Stage] += int64(o.End - o.Start)
		for _, p := range list[:i] {
			assert.True(t, o.Start >= p.End || p.Start >= o.End, "%v overlaps %v", o, p)
		}
	}
	for s, ns := range told {
		assert.LessOrEqual(t, ns, max(r.Exclusive[s], r.Plain[s])+ms, "%s in %+v, %s", stage.Stage(s), list, describe(r))
	}
}

// A client that writes its head byte by byte: the request's bytes are read at
// once, what takes long is that there are no more of them.
func TestAHeadThatDribblesInIsRequestBody(t *testing.T) {
	requireRoot(t)
	for _, loop := range []bool{false, true} {
		t.Run(fmt.Sprintf("loop=%v", loop), func(t *testing.T) {
			s := startC(t, loop)
			w := observe(t, probe.Config{}, s)
			conn := s.dial()
			began := time.Now()
			for _, b := range []byte("GET / HTTP/1.1\r\nHost: x\r\nDribble: abcdefghijklmnop\r\n\r\n") {
				_, err := conn.Write([]byte{b})
				require.NoError(t, err)
				<-time.After(2 * time.Millisecond) // the client's slowness is the fault
			}
			took := time.Since(began)
			answered(t, conn)
			r := &w.wait(2)[1]
			requireWhole(t, r)
			list := w.of(r)
			assertNoMoreThanTheTotals(t, list, r)
			total := r.Exclusive[stage.RequestBody]
			assert.Equal(t, "request_body", top(r, stage.RequestBody).String(), describe(r))
			assert.Greater(t, float64(total), tolerance/2*float64(took), describe(r))
			assert.Greater(t, w.stall(r, stage.RequestBody).Duration, total*9/10, "%+v %s", list, describe(r))
		})
	}
}

// The first piece of a head finds the loop at work, and the second is long in
// coming: each has its time, and what is told of the one is none of the other's.
func TestAHeadThatLiesUnreadAndThenIsWaitedFor(t *testing.T) {
	requireRoot(t)
	s := startC(t, true)
	w := observe(t, probe.Config{}, s)
	conn, busy := s.dial(), s.dial()
	write(t, busy, "/cpu?60")
	w.awaitBegun(3)
	_, err := io.WriteString(conn, "GET / HTT")
	require.NoError(t, err)
	answered(t, busy)
	<-time.After(3 * delayMS * time.Millisecond) // the client's slowness is the fault
	_, err = io.WriteString(conn, "P/1.1\r\nHost: x\r\n\r\n")
	require.NoError(t, err)
	answered(t, conn)
	var r *assemble.Request
	for _, f := range w.wait(4)[2:] {
		if f.Head.Path == "/" {
			r = &f
		}
	}
	require.NotNil(t, r)
	requireWhole(t, r)
	list := w.of(r)
	assertNoMoreThanTheTotals(t, list, r)
	body := w.stall(r, stage.RequestBody)
	t.Logf("%+v %s", body, describe(r))
	assert.Greater(t, float64(body.Duration), tolerance*delayMS*float64(ms), "%+v %s", list, describe(r))
	assert.Greater(t, body.Duration, r.Exclusive[stage.RequestBody]*9/10, "%+v %s", list, describe(r))
	assert.Less(t, r.FirstRead-body.End, uint64(20*ms), "it ends when the rest has come: %s", describe(r))
}

// A process is killed while it waits for a lock: what the request's span says of
// the lock its total says too.
func TestAKilledServersStallIsInTheTotal(t *testing.T) {
	requireRoot(t)
	s := startC(t, false)
	w := observe(t, probe.Config{}, s)
	s.get("/") // pages in the process
	conn, err := net.Dial("tcp4", s.addr)
	require.NoError(t, err)
	defer conn.Close()
	write(t, conn, "/lock?5000")
	w.awaitBegun(2)
	<-time.After(2 * delayMS * time.Millisecond) // of the lock
	require.NoError(t, s.cmd.Process.Kill())
	_, err = http.ReadResponse(bufio.NewReader(conn), nil)
	require.Error(t, err, "the server was to die before it answers")
	r := &w.wait(2)[1]
	require.Empty(t, r.Refused)
	assert.Contains(t, r.Incomplete, assemble.IncompleteAborted)
	list := w.of(r)
	assertNoMoreThanTheTotals(t, list, r)
	lock := w.stall(r, stage.Lock)
	t.Logf("%+v %s", lock, describe(r))
	assert.Greater(t, float64(lock.Duration), tolerance*2*delayMS*float64(ms), "%+v %s", list, describe(r))
	assert.NotContains(t, r.Missing, stage.Lock, describe(r))
	assert.Less(t, r.Exclusive[stage.Unattributed], 20*ms, describe(r))
}

// What a waker did comes in parts, with other things in between.
func TestSpansOfWakersTellOfNoMoreThanTheTotals(t *testing.T) {
	requireRoot(t)
	for _, loop := range []bool{false, true} {
		t.Run(fmt.Sprintf("loop=%v", loop), func(t *testing.T) {
			s := startEngines(t, "unix", loop)
			w := observeEngines(t, s)
			s.get("/engine0/sleep?1")
			for i, f := range engineFaults {
				t.Run(f.name, func(t *testing.T) {
					s.t, w.t = t, t
					if f.cause != nil {
						defer f.cause(t, s)()
					}
					s.get("/engine0/" + f.path)
					r := &w.wait(2 + i)[1+i]
					requireWhole(t, r)
					for _, o := range w.of(r) {
						t.Logf("%s %v of %v, stage %v", o.Stage, time.Duration(o.Duration), time.Duration(o.Stretch), time.Duration(r.Exclusive[o.Stage]))
					}
					assertNoMoreThanTheTotals(t, w.of(r), r)
				})
			}
		})
	}
}
