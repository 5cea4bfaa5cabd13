//go:build linux

package kerneltest

import (
	"bufio"
	"io"
	"net"
	"net/http"
	"os"
	"runtime"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/ebpfllm/ebpfllm/internal/disturb"
	"github.com/ebpfllm/ebpfllm/internal/probe"
)

// pinThread keeps the calling thread, which must be locked, on a CPU.
func pinThread(cpu int) error {
	var set unix.CPUSet
	set.Set(cpu)
	return unix.SchedSetaffinity(0, &set)
}

// The softirq that brings a request's bytes is raised on a CPU that cannot run it
// for a while: the request begins late, and its evidence says by how much.
func TestALateSoftirqIsEvidence(t *testing.T) {
	requireRoot(t)
	if runtime.NumCPU() < 2 {
		t.Skip("needs two CPUs")
	}
	// A network of its own, whose packets are handled on CPU 1. Never unlocked:
	// the thread ends with the test, and takes the network with it.
	runtime.LockOSThread()
	require.NoError(t, unix.Unshare(unix.CLONE_NEWNET|unix.CLONE_NEWNS))
	require.NoError(t, unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""))
	sys := t.TempDir()
	require.NoError(t, unix.Mount("sysfs", sys, "sysfs", 0, ""))
	defer func() { assert.NoError(t, unix.Unmount(sys, unix.MNT_DETACH)) }()
	up(t, "lo")
	if err := os.WriteFile(sys+"/class/net/lo/queues/rx-0/rps_cpus", []byte("2"), 0o644); err != nil {
		t.Skip("needs CONFIG_RPS: ", err)
	}
	require.NoError(t, pinThread(0)) // and the server with it
	s := startC(t, false)
	w := observe(t, probe.Config{}, s)
	var st syscall.Stat_t
	require.NoError(t, syscall.Stat("/proc/thread-self/ns/net", &st))
	require.NoError(t, w.probe.AddPort(uint32(st.Ino), s.port))
	conn, err := net.Dial("tcp4", s.addr)
	require.NoError(t, err)
	defer conn.Close()
	in := bufio.NewReader(conn)
	ask := func() time.Time {
		_, err := io.WriteString(conn, "GET / HTTP/1.1\r\nHost: x\r\n\r\n")
		require.NoError(t, err)
		return time.Now()
	}
	reply := func() time.Time {
		r, err := http.ReadResponse(in, nil)
		require.NoError(t, err)
		at := time.Now()
		_, err = io.Copy(io.Discard, r.Body)
		require.NoError(t, err)
		require.NoError(t, r.Body.Close())
		return at
	}
	ask()
	reply()

	hog, err := disturb.NewSoftirqHog(1, 80*time.Millisecond)
	require.NoError(t, err)
	defer hog.Close()
	var late time.Duration
	try := 1
	for ; late < 20*time.Millisecond; try++ { // others of the machine may have had CPU 1
		require.LessOrEqual(t, try, 10, "softirqs were never kept from CPU 1")
		var running atomic.Bool
		ended := make(chan error)
		go func() { ended <- hog.Hold(func() { running.Store(true) }) }()
		for !running.Load() {
			<-time.After(100 * time.Microsecond)
		}
		<-time.After(20 * time.Millisecond)
		sent := ask()
		got := reply()
		require.NoError(t, <-ended)
		late = got.Sub(sent)
		t.Logf("try %d: answered after %v", try, late)
	}
	list := w.wait(try)
	r := &list[len(list)-1]
	for i := range list { // the latest
		if list[i].Seq > r.Seq {
			r = &list[i]
		}
	}
	requireWhole(t, r)
	t.Logf("answered after %v, softirq late by %v: %s", late, time.Duration(r.SoftirqDelay), describe(r))
	assert.InDelta(t, late, r.SoftirqDelay, float64(10*ms), "the delay is the softirq's, and lies before the request: "+describe(r))
	assert.Less(t, int64(r.End-r.Start), late.Nanoseconds(), describe(r))
	assert.GreaterOrEqual(t, list[0].SoftirqDelay, int64(0), "known, and short")
	assert.Less(t, list[0].SoftirqDelay, 20*ms)
	assert.EqualValues(t, -1, r.RemoteFaults, "one node: unknown is not zero")
}

// up brings up a network device of the thread's network.
func up(t *testing.T, name string) {
	t.Helper()
	fd, err := unix.Socket(unix.AF_INET, unix.SOCK_DGRAM|unix.SOCK_CLOEXEC, 0)
	require.NoError(t, err)
	defer unix.Close(fd)
	ifr, err := unix.NewIfreq(name)
	require.NoError(t, err)
	ifr.SetUint16(unix.IFF_UP)
	require.NoError(t, unix.IoctlIfreq(fd, unix.SIOCSIFFLAGS, ifr), "bring up %s", name)
}
