//go:build linux

package link

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"
)

func newLink(t *testing.T) *Link {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("needs root: makes a network namespace and TUN devices")
	}
	l, err := New()
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, l.Close()) })
	return l
}

// connect joins a client with serve, which runs at the far end.
func connect(t *testing.T, l *Link, serve func(net.Conn)) *net.TCPConn {
	t.Helper()
	listener, err := l.Listen()
	require.NoError(t, err)
	done := make(chan struct{})
	go func() {
		defer close(done)
		if c, err := listener.Accept(); err == nil {
			serve(c)
			_ = c.Close()
		}
	}()
	c, err := net.DialTimeout("tcp", listener.Addr().String(), 5*time.Second)
	require.NoError(t, err)
	t.Cleanup(func() {
		_ = c.Close()
		_ = listener.Close()
		<-done
	})
	require.NoError(t, c.SetDeadline(time.Now().Add(30*time.Second)))
	return c.(*net.TCPConn)
}

func echo(c net.Conn) { _, _ = io.Copy(c, c) }

// roundTrips are n round trips of one byte, sorted.
func roundTrips(t *testing.T, c net.Conn, n int) []time.Duration {
	t.Helper()
	b := []byte{'x'}
	all := make([]time.Duration, n)
	for i := range all {
		start := time.Now()
		_, err := c.Write(b)
		require.NoError(t, err)
		_, err = io.ReadFull(c, b)
		require.NoError(t, err)
		all[i] = time.Since(start)
	}
	slices.Sort(all)
	return all
}

func TestRoundTripsTakeTheDelayOfBothWays(t *testing.T) {
	l := newLink(t)
	c := connect(t, l, echo)
	bare := roundTrips(t, c, 50)
	l.Set(ToServer, Path{Delay: 12 * time.Millisecond})
	l.Set(ToClient, Path{Delay: 8 * time.Millisecond})
	delayed := roundTrips(t, c, 50)
	t.Logf("bare: least %v, median %v; 20 ms: least %v, median %v", bare[0], bare[25], delayed[0], delayed[25])
	assert.GreaterOrEqual(t, delayed[0], 20*time.Millisecond)
	assert.Less(t, delayed[5], 25*time.Millisecond, "%v", delayed)
	l.Set(ToServer, Path{})
	l.Set(ToClient, Path{})
	assert.Less(t, roundTrips(t, c, 50)[5], 10*time.Millisecond, "the delay is gone")
}

func TestBytesFlowAtTheRate(t *testing.T) {
	const size = 1 << 20
	for name, limit := range map[string]func(*Link) error{
		"of the link": func(l *Link) error {
			l.Set(ToClient, Path{Rate: 16e6, Buffer: 64 << 10})
			return nil
		},
		"of the server's queue": func(l *Link) error { return l.Shape(16e6, 4<<10, 64<<10) },
	} {
		t.Run(name, func(t *testing.T) {
			l := newLink(t)
			require.NoError(t, limit(l))
			c := connect(t, l, func(c net.Conn) { _, _ = c.Write(make([]byte, size)) })
			start := time.Now()
			n, err := io.Copy(io.Discard, c)
			require.NoError(t, err)
			require.EqualValues(t, size, n)
			// 1 MiB is 524 ms of 16 Mbit/s, and the heads of its packets 3 % beside
			took := time.Since(start)
			t.Logf("%v, %+v", took, l.Stats(ToClient))
			assert.Greater(t, took, 500*time.Millisecond)
			assert.Less(t, took, 2*time.Second)
		})
	}
}

func TestLostSegmentsAreSentAgain(t *testing.T) {
	l := newLink(t)
	c := connect(t, l, echo)
	roundTrips(t, c, 5)
	l.Drop(ToServer, "x", 1)
	// the kernel waits for 200 ms at least before it sends a lone segment again
	assert.Greater(t, roundTrips(t, c, 1)[0], 100*time.Millisecond)
	assert.Equal(t, 1, l.Stats(ToServer).Chosen)
	assert.EqualValues(t, 1, retransmits(t, c))
	assert.Less(t, roundTrips(t, c, 20)[2], 100*time.Millisecond, "one was to be lost")

	l.Set(ToServer, Path{Loss: 0.3})
	before := l.Stats(ToServer)
	roundTrips(t, c, 20)
	after := l.Stats(ToServer)
	t.Logf("%+v", after)
	assert.Positive(t, after.Lost-before.Lost)
	assert.Greater(t, retransmits(t, c), uint32(1))
}

func retransmits(t *testing.T, c *net.TCPConn) uint32 {
	t.Helper()
	raw, err := c.SyscallConn()
	require.NoError(t, err)
	var info *unix.TCPInfo
	require.NoError(t, raw.Control(func(fd uintptr) { info, err = unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO) }))
	require.NoError(t, err)
	return info.Total_retrans
}

func TestProcessesRunInTheServersNamespace(t *testing.T) {
	l := newLink(t)
	ns, err := l.NetNS()
	require.NoError(t, err)
	line := l.Enter("readlink", "/proc/self/ns/net")
	out, err := exec.Command(line[0], line[1:]...).Output()
	require.NoError(t, err)
	assert.Equal(t, fmt.Sprintf("net:[%d]\n", ns), string(out))
	own, err := os.Readlink("/proc/self/ns/net")
	require.NoError(t, err)
	assert.NotEqual(t, own+"\n", string(out))

	require.NoError(t, l.Sysctl("net/ipv4/tcp_congestion_control", "reno"))
	require.NoError(t, l.Do(func() error {
		b, err := os.ReadFile("/proc/sys/net/ipv4/tcp_congestion_control")
		assert.Equal(t, "reno\n", string(b))
		return err
	}))
	b, err := os.ReadFile("/proc/sys/net/ipv4/tcp_congestion_control")
	require.NoError(t, err)
	assert.NotEqual(t, "reno\n", string(b), "the host keeps its own")
}

func TestNothingIsLeftBehind(t *testing.T) {
	l := newLink(t)
	name := l.devices[0].name
	_, err := net.InterfaceByName(name)
	require.NoError(t, err)
	other, err := New()
	require.NoError(t, err, "links stand side by side")
	assert.NotEqual(t, l.Server, other.Server)
	name = other.devices[0].name
	require.NoError(t, other.Close())
	_, err = net.InterfaceByName(name)
	assert.Error(t, err)
}

// A process that is killed cannot tidy up.
func TestAKilledProcessLeavesNothingBehind(t *testing.T) {
	if os.Getenv("EBPFLLM_LINK_TEST_CHILD") != "" {
		l := newLink(t)
		fmt.Println(l.devices[0].name)
		select {}
	}
	if os.Geteuid() != 0 {
		t.Skip("needs root: makes a network namespace and TUN devices")
	}
	cmd := exec.Command(os.Args[0], "-test.run=^TestAKilledProcessLeavesNothingBehind$") //nolint:gosec // this binary
	cmd.Env = append(os.Environ(), "EBPFLLM_LINK_TEST_CHILD=1")
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	name, err := bufio.NewReader(out).ReadString('\n')
	require.NoError(t, err)
	name = strings.TrimSpace(name)
	_, err = net.InterfaceByName(name)
	require.NoError(t, err)
	require.NoError(t, cmd.Process.Kill())
	assert.Error(t, cmd.Wait())
	require.Eventually(t, func() bool { _, err := net.InterfaceByName(name); return err != nil }, 5*time.Second, 10*time.Millisecond)
}
