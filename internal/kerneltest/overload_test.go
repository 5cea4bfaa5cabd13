//go:build linux

package kerneltest

import (
	"bufio"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/ebpfllm/ebpfllm/internal/probe"
	"github.com/ebpfllm/ebpfllm/internal/stage"
)

// The ring is as small as it can be and its reader stands still, then crawls,
// then runs. Whatever the kernel side made was read, or is counted as lost; and
// no request lacks anything of which it does not say so.
func TestUnderOverloadEachRecordIsReadOrCountedAsLost(t *testing.T) {
	requireRoot(t)
	s := startC(t, false)
	var speed atomic.Int32 // 0: stands still, 1: crawls, 2: runs
	speed.Store(2)
	w := observeSlowly(t, probe.Config{RingBytes: os.Getpagesize()}, func() {
		for speed.Load() == 0 {
			time.Sleep(time.Millisecond)
		}
		if speed.Load() == 1 {
			time.Sleep(300 * time.Microsecond)
		}
	}, s)
	var asked atomic.Int64
	const chunks = 4
	var mu sync.Mutex
	answers := map[string]uint64{} // bytes of an answer, by path
	ask := func(conn net.Conn, path string) error {
		asked.Add(1)
		if _, err := io.WriteString(conn, "GET "+path+" HTTP/1.1\r\nHost: x\r\n\r\n"); err != nil {
			return err
		}
		var n bytesRead
		r, err := http.ReadResponse(bufio.NewReader(io.TeeReader(conn, &n)), nil)
		if err != nil {
			return err
		}
		_, err = io.Copy(io.Discard, r.Body)
		mu.Lock()
		defer mu.Unlock()
		path, _, _ = strings.Cut(path, "?")
		answers[path] = uint64(n) // always the same
		return errors.Join(err, r.Body.Close())
	}
	client := func() error {
		kept, err := net.Dial("tcp4", s.addr)
		if err != nil {
			return err
		}
		defer kept.Close()
		for range 10 {
			conn, err := net.Dial("tcp4", s.addr)
			if err != nil {
				return err
			}
			err = errors.Join(ask(kept, "/"), ask(kept, "/stream?"+strconv.Itoa(chunks)), ask(kept, "/pipe?5"),
				ask(conn, "/"), conn.Close(), exec.Command("true").Run())
			if err != nil {
				return err
			}
		}
		return nil
	}
	load := func() {
		clients := make(chan error, 4)
		for range cap(clients) {
			go func() { clients <- client() }()
		}
		for range cap(clients) {
			require.NoError(t, <-clients)
		}
	}
	counters := func() probe.Counters {
		c, err := w.probe.Counters()
		require.NoError(t, err)
		return c
	}
	kinds := []string{"request_head", "response_head", "progress", "occurrence", "close", "process"}
	lostOfEach := func() bool {
		c := counters()
		for _, k := range kinds {
			if c.Lost["ring_full_"+k] == 0 {
				return false
			}
		}
		return true
	}
	load()
	for deadline := time.Now().Add(30 * time.Second); ; {
		speed.Store(0)
		load()
		speed.Store(1)
		load()
		if lostOfEach() {
			break
		}
		require.True(t, time.Now().Before(deadline), "the ring is never full: %v", counters().Lost)
	}
	speed.Store(2)
	load()

	var c probe.Counters
	balanced := func() bool {
		c = counters()
		for _, k := range kinds {
			if c.Sent[k] != c.Records[k]+c.Lost["ring_full_"+k] {
				return false
			}
		}
		return true
	}
	balances := assert.Eventually(t, balanced, 5*time.Second, 50*time.Millisecond)
	for _, k := range kinds {
		t.Logf("%-14s sent %d = read %d + lost %d", k, c.Sent[k], c.Records[k], c.Lost["ring_full_"+k])
		assert.Equal(t, c.Sent[k], c.Records[k]+c.Lost["ring_full_"+k], k)
	}
	require.True(t, balances)
	assert.Zero(t, c.Lost["invalid"])
	assert.EqualValues(t, asked.Load(), c.Sent["request_head"], "each request's head is a record")
	assert.EqualValues(t, asked.Load(), c.Sent["response_head"])

	// stalls are held for a while, and the requests that they delayed with them
	time.Sleep(2 * time.Second)
	w.mu.Lock()
	begun, finished := w.begun, slices.Clone(w.finished)
	w.mu.Unlock()
	assert.EqualValues(t, asked.Load(), uint64(begun)+c.Lost["ring_full_request_head"], "requests that are known, and those whose head was lost")
	whole, marked := 0, 0
	for i := range finished {
		r := &finished[i]
		if r.Refused != "" || len(r.Incomplete) > 0 {
			marked++
			continue
		}
		whole++
		if r.Head.Path == "/stream" {
			assert.Equal(t, chunks, r.Chunks)
		}
		assert.Equal(t, answers[r.Head.Path], r.BytesOut, "its last reading was lost, and it does not say so: %s", describe(r))
		assert.Equal(t, 200, r.Status)
		if blocked := r.Exclusive[stage.Syscall]; blocked > 2*ms {
			assert.Greater(t, w.stall(r, stage.Syscall).Duration, blocked/2, "its occurrence was lost, and it does not say so: %s", describe(r))
		}
	}
	t.Logf("%d requests: %d whole, %d marked, %d without an end, %d without a head", asked.Load(), whole, marked, begun-len(finished), c.Lost["ring_full_request_head"])
	assert.Positive(t, whole)
	assert.Positive(t, marked)
}

// bytesRead counts.
type bytesRead uint64

func (n *bytesRead) Write(p []byte) (int, error) {
	*n += bytesRead(len(p))
	return len(p), nil
}
