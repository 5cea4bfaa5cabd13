//go:build linux

package kerneltest

import (
	"encoding/binary"
	"fmt"
	"net"
	"os"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/ebpfllm/ebpfllm/internal/probe"
	"github.com/ebpfllm/ebpfllm/internal/stage"
)

// numbers are what one end of a connection counts by.
type numbers struct {
	sequence uint32 // of the next byte that it sends
	clock    uint32 // of its time stamps, in ms
}

// repaired joins two sockets of this process over loopback that were never opened: their
// sequence numbers and time stamps are what the test wants them to be (TCP_REPAIR).
func repaired(t *testing.T, port uint16, server, client numbers) (serverFD int, conn *net.TCPConn) {
	t.Helper()
	var fds [2]int
	var addrs [2]unix.SockaddrInet4
	for i := range fds {
		fd, err := unix.Socket(unix.AF_INET, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		require.NoError(t, err)
		fds[i] = fd
		addrs[i] = unix.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}
		if err := unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_REPAIR, 1); err != nil {
			t.Skip("needs TCP_REPAIR (CONFIG_CHECKPOINT_RESTORE): ", err)
		}
		require.NoError(t, unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_REUSEADDR, 1))
		if i == 0 {
			addrs[i].Port = int(port)
		}
		require.NoError(t, unix.Bind(fd, &addrs[i]))
		name, err := unix.Getsockname(fd)
		require.NoError(t, err)
		addrs[i] = *name.(*unix.SockaddrInet4)
	}
	both := [2]numbers{server, client}
	for i, fd := range fds {
		own, peer := both[i], both[1-i]
		set := func(option int, value uint32) {
			require.NoError(t, unix.SetsockoptInt(fd, unix.IPPROTO_TCP, option, int(int32(value))), "TCP option %d", option)
		}
		const receiveQueue, sendQueue = 1, 2
		set(unix.TCP_REPAIR_QUEUE, sendQueue)
		set(unix.TCP_QUEUE_SEQ, own.sequence)
		set(unix.TCP_REPAIR_QUEUE, receiveQueue)
		set(unix.TCP_QUEUE_SEQ, peer.sequence)
		require.NoError(t, unix.Connect(fd, &addrs[1-i]))
		// what the handshake would have agreed on: struct tcp_repair_opt of each
		var options []byte
		for _, o := range [][2]uint32{{2 /* MSS */, 32768}, {3 /* window scales */, 7 | 7<<16}, {8 /* time stamps */, 0}} {
			options = binary.NativeEndian.AppendUint32(options, o[0])
			options = binary.NativeEndian.AppendUint32(options, o[1])
		}
		require.NoError(t, unix.SetsockoptString(fd, unix.IPPROTO_TCP, unix.TCP_REPAIR_OPTIONS, string(options)))
		set(unix.TCP_TIMESTAMP, own.clock)
		// struct tcp_repair_window: snd_wl1, snd_wnd, max_window, rcv_wnd, rcv_wup
		var window []byte
		for _, v := range []uint32{peer.sequence, 65535, 65535, 65535, peer.sequence} {
			window = binary.NativeEndian.AppendUint32(window, v)
		}
		require.NoError(t, unix.SetsockoptString(fd, unix.IPPROTO_TCP, unix.TCP_REPAIR_WINDOW, string(window)))
	}
	for _, fd := range fds {
		require.NoError(t, unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_REPAIR, -1 /* off, without a probe */))
	}
	f := os.NewFile(uintptr(fds[1]), "client")
	defer f.Close()
	c, err := net.FileConn(f)
	require.NoError(t, err)
	t.Cleanup(func() { _ = c.Close() })
	return fds[0], c.(*net.TCPConn)
}

// give hands a connection to the server.
func (s *server) give(fd int) {
	s.t.Helper()
	over := dial(s.t, "unix", fmt.Sprintf("@ebpfllm-sockets-%d", s.port)).(*net.UnixConn)
	_, _, err := over.WriteMsgUnix([]byte{0}, unix.UnixRights(fd), nil)
	require.NoError(s.t, err)
	require.NoError(s.t, unix.Close(fd))
}

// Sequence numbers go round every 4 GiB, the kernel's milliseconds every 49 days. Both turn while the answer is sent: of
// the connection's first bytes, of its time stamps, and in the midst of a loss.
func TestSequenceNumbersAndTimeStampsThatGoRound(t *testing.T) {
	requireRoot(t)
	for _, lost := range []bool{false, true} {
		t.Run(fmt.Sprintf("lost=%v", lost), func(t *testing.T) {
			s := startSockets(t, "given")
			w := observe(t, probe.Config{}, s)
			const before = 1000 // bytes, ms
			fd, conn := repaired(t, s.port, numbers{-before & 0xffffffff, -before & 0xffffffff}, numbers{-100 & 0xffffffff, -before & 0xffffffff})
			s.give(fd)
			start := time.Now()
			d := &deaf{t: t, tcp: conn}
			exchange(t, conn, "/") // begun before its socket was known: its arrival is not
			exchange(t, conn, "/")
			seen := d.bytesReceived()
			require.Less(t, seen, uint64(before))
			if lost {
				<-time.After(before*time.Millisecond - 2*delayMS*time.Millisecond - time.Since(start)) // to be under way as the time stamps turn
				d.lose(true)
			}
			asked := time.Now()
			write(t, conn, "/big?40")
			if lost {
				<-time.After(3 * delayMS * time.Millisecond)
				require.Equal(t, seen, d.bytesReceived(), "the answer was not lost")
				require.Greater(t, time.Since(start), before*time.Millisecond, "the time stamps have not turned")
				d.lose(false)
			}
			n := answer(t, conn)
			took := time.Since(asked).Nanoseconds()
			require.Greater(t, d.bytesReceived(), uint64(before), "the numbers have not turned")
			if !lost {
				n = exchange(t, conn, "/big?40") // and everything is as before behind the turn
			}
			all := w.wait(3)
			for _, r := range all[1:] {
				requireWhole(t, &r)
				assert.Empty(t, r.Missing, describe(&r))
				assert.Equal(t, 200, r.Status)
			}
			r := &all[len(all)-1]
			assert.Equal(t, n, r.BytesOut)
			if lost {
				t.Logf("client %v: %s", time.Duration(took), describe(r))
				assert.Equal(t, "retransmit", top(r, stage.Retransmit).String(), describe(r))
				assert.InDelta(t, took, r.End-r.Start, float64(20*ms), describe(r))
				assert.Positive(t, r.Retransmits)
				return
			}
			r = &w.wait(4)[3]
			requireWhole(t, r)
			for _, r := range w.wait(4)[2:] {
				assert.Zero(t, r.Retransmits)
				assert.Less(t, r.Plain[stage.SendBuffer]+r.Plain[stage.Qdisc], 20*ms, describe(&r))
				assert.Less(t, int64(r.End-r.Start), 100*ms, describe(&r))
			}
		})
	}
}
