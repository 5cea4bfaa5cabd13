//go:build linux

package kerneltest

import (
	"bufio"
	"io"
	"net"
	"net/http"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/ebpfllm/ebpfllm/internal/probe"
	"github.com/ebpfllm/ebpfllm/internal/stage"
)

// deaf is a client's connection whose kernel can be made to lose what comes in.
type deaf struct {
	t   *testing.T
	tcp *net.TCPConn
	in  *bufio.Reader
}

func dialDeaf(t *testing.T, addr string) *deaf {
	t.Helper()
	conn, err := net.Dial("tcp4", addr)
	require.NoError(t, err)
	t.Cleanup(func() { _ = conn.Close() })
	return &deaf{t: t, tcp: conn.(*net.TCPConn), in: bufio.NewReader(conn)}
}

// lose drops every segment before the client's TCP sees it, as a bad line would:
// a filter that takes 0 bytes of each.
func (d *deaf) lose(on bool) {
	d.t.Helper()
	raw, err := d.tcp.SyscallConn()
	require.NoError(d.t, err)
	var e error
	require.NoError(d.t, raw.Control(func(fd uintptr) {
		if !on {
			e = unix.SetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_DETACH_FILTER, 0)
			return
		}
		nothing := unix.SockFilter{Code: unix.BPF_RET | unix.BPF_K}
		e = unix.SetsockoptSockFprog(int(fd), unix.SOL_SOCKET, unix.SO_ATTACH_FILTER, &unix.SockFprog{Len: 1, Filter: &nothing})
	}))
	require.NoError(d.t, e)
}

func (d *deaf) ask(path string, header string) {
	d.t.Helper()
	_, err := io.WriteString(d.tcp, "GET "+path+" HTTP/1.1\r\nHost: x\r\n"+header+"\r\n")
	require.NoError(d.t, err)
}

func (d *deaf) reply() {
	d.t.Helper()
	r, err := http.ReadResponse(d.in, nil)
	require.NoError(d.t, err)
	_, err = io.Copy(io.Discard, r.Body)
	require.NoError(d.t, err)
	require.NoError(d.t, r.Body.Close())
}

// bytesReceived is how many bytes the client's kernel has taken in.
func (d *deaf) bytesReceived() uint64 {
	d.t.Helper()
	raw, err := d.tcp.SyscallConn()
	require.NoError(d.t, err)
	var info *unix.TCPInfo
	var e error
	require.NoError(d.t, raw.Control(func(fd uintptr) { info, e = unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO) }))
	require.NoError(d.t, e)
	return info.Bytes_received
}

// The client's clock is the truth: it has the whole response only when what was
// lost has come again.
func TestALostResponseIsRetransmit(t *testing.T) {
	requireRoot(t)
	for name, c := range map[string]struct {
		path, header string
	}{
		"kept alive":                   {path: "/sleep?20"},
		"closed by the server at once": {path: "/sleep?20", header: "Connection: close\r\n"},
		"larger than the window":       {path: "/big?8192"},
	} {
		t.Run(name, func(t *testing.T) {
			s := startC(t, false)
			w := observe(t, probe.Config{}, s)
			d := dialDeaf(t, s.addr)
			d.ask("/", "")
			d.reply()
			seen := d.bytesReceived()
			d.lose(true)
			start := time.Now()
			d.ask(c.path, c.header)
			<-time.After(100 * time.Millisecond)
			require.Equal(t, seen, d.bytesReceived(), "the response was not lost")
			d.lose(false)
			d.reply()
			took := time.Since(start).Nanoseconds()
			r := &w.wait(2)[1]
			requireWhole(t, r)
			t.Logf("client %v: %s", time.Duration(took), describe(r))
			assert.Positive(t, r.Retransmits)
			assert.Equal(t, "retransmit", top(r, stage.Retransmit).String(), describe(r))
			assert.InDelta(t, took, r.End-r.Start, float64(20*ms), "the request ends when the client has it: "+describe(r))
			assert.Greater(t, float64(r.Exclusive[stage.Retransmit]), tolerance*float64(took-20*ms), describe(r))
			assert.GreaterOrEqual(t, r.Plain[stage.Retransmit], r.Exclusive[stage.Retransmit])
			assertOccurrences(t, w.of(r), stage.Retransmit, r)
		})
	}
}

// What is lost in the middle of a stream and comes again before its end delays
// the client, and not the request.
func TestALossInAStreamDoesNotMoveItsEnd(t *testing.T) {
	requireRoot(t)
	s := startC(t, false)
	w := observe(t, probe.Config{}, s)
	d := dialDeaf(t, s.addr)
	d.ask("/stream?400", "") // 2 ms each
	<-time.After(50 * time.Millisecond)
	seen := d.bytesReceived()
	d.lose(true)
	<-time.After(50 * time.Millisecond)
	require.LessOrEqual(t, d.bytesReceived(), seen+14*2, "nothing was lost")
	d.lose(false)
	d.reply()
	r := &w.wait(1)[0]
	requireWhole(t, r)
	t.Log(describe(r))
	assert.Positive(t, r.Retransmits)
	assert.Greater(t, r.Plain[stage.Retransmit], 30*ms, describe(r))
	assert.Equal(t, "wait", top(r, stage.Unknown).String(), "the server's own pace: "+describe(r))
	assert.Equal(t, 400, r.Chunks)
}

// Without a loss nobody waits for an ACK, and nothing is counted.
func TestWithoutALossNothingIsRetransmit(t *testing.T) {
	requireRoot(t)
	s := startC(t, false)
	w := observe(t, probe.Config{}, s)
	d := dialDeaf(t, s.addr)
	for range 3 {
		d.ask("/sleep?5", "")
		d.reply()
	}
	for _, r := range w.wait(3) {
		requireWhole(t, &r)
		assert.Zero(t, r.Retransmits)
		assert.Zero(t, r.Exclusive[stage.Retransmit]+r.Plain[stage.Retransmit], describe(&r))
		assert.Less(t, int64(r.End-r.Start), 30*ms, describe(&r))
	}
}

// A client that goes away before it has the response: the wait is the network's,
// and the request is not whole.
func TestAClientThatIsGoneEndsTheLoss(t *testing.T) {
	requireRoot(t)
	s := startC(t, false)
	w := observe(t, probe.Config{}, s)
	d := dialDeaf(t, s.addr)
	d.ask("/", "")
	d.reply()
	d.lose(true)
	d.ask("/sleep?5", "")
	<-time.After(50 * time.Millisecond)
	// a reset instead of a FIN, which the server's kernel takes at once
	require.NoError(t, d.tcp.SetLinger(0))
	<-time.After(400 * time.Millisecond)
	require.NoError(t, d.tcp.Close())
	r := &w.wait(2)[1]
	t.Log(describe(r))
	assert.Equal(t, []string{"aborted"}, r.Incomplete, describe(r))
	assert.Positive(t, r.Retransmits)
	assert.Greater(t, r.Exclusive[stage.Retransmit], 300*ms, describe(r))
}
