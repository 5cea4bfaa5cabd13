//go:build linux

package kerneltest

import (
	"bufio"
	"fmt"
	"net"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/ebpfllm/ebpfllm/internal/probe"
	"github.com/ebpfllm/ebpfllm/internal/stage"
)

// run runs a command of the system.
func run(t *testing.T, command string) {
	t.Helper()
	args := strings.Fields(command)
	out, err := exec.CommandContext(t.Context(), args[0], args[1:]...).CombinedOutput()
	require.NoError(t, err, "%s: %s", command, out)
}

// network makes named network namespaces, and takes them away.
func network(t *testing.T, names ...string) (full []string) {
	t.Helper()
	for _, tool := range []string{"ip", "tc"} {
		if _, err := exec.LookPath(tool); err != nil {
			t.Skip("needs iproute2: ", err)
		}
	}
	for _, n := range names {
		n = fmt.Sprintf("ebpfllm-%d-%s", os.Getpid(), n)
		run(t, "ip netns add "+n)
		t.Cleanup(func() { _ = exec.Command("ip", "netns", "delete", n).Run() }) //nolint:noctx // the test's is over by then
		run(t, "ip -n "+n+" link set lo up")
		full = append(full, n)
	}
	return full
}

// dialIn connects from within a network namespace.
func dialIn(t *testing.T, name, addr string) net.Conn {
	t.Helper()
	type result struct {
		net.Conn
		error
	}
	done := make(chan result)
	go func() {
		runtime.LockOSThread() // never unlocked: the thread ends with the goroutine, and does not come back from there
		fd, err := unix.Open("/run/netns/"+name, unix.O_RDONLY|unix.O_CLOEXEC, 0)
		if err == nil {
			err = unix.Setns(fd, unix.CLONE_NEWNET)
			_ = unix.Close(fd)
		}
		var conn net.Conn
		if err == nil {
			conn, err = net.DialTimeout("tcp4", addr, 5*time.Second)
		}
		done <- result{conn, err}
	}()
	r := <-done
	require.NoError(t, r.error)
	t.Cleanup(func() { _ = r.Close() })
	return r.Conn
}

// A server in a container's network: its bytes pass a veth pair, and perhaps a bridge and another pair. A request ends
// when its last byte is handed to the first device, the server's own.
func TestAServerBehindVethAndABridge(t *testing.T) {
	requireRoot(t)
	for _, bridge := range []bool{false, true} {
		t.Run(fmt.Sprintf("bridge=%v", bridge), func(t *testing.T) {
			ns := network(t, "server", "client", "host")
			inside, outside, host := ns[0], ns[1], ns[2]
			if bridge {
				run(t, "ip -n "+host+" link add br0 type bridge")
				run(t, "ip -n "+host+" link set br0 up")
				for i, n := range []string{inside, outside} {
					run(t, fmt.Sprintf("ip -n %s link add eth0 type veth peer name port%d netns %s", n, i, host))
					run(t, fmt.Sprintf("ip -n %s link set port%d master br0", host, i))
					run(t, fmt.Sprintf("ip -n %s link set port%d up", host, i))
				}
			} else {
				run(t, "ip -n "+inside+" link add eth0 type veth peer name eth0 netns "+outside)
			}
			for i, n := range []string{inside, outside} {
				run(t, fmt.Sprintf("ip -n %s addr add 10.77.0.%d/24 dev eth0", n, i+1))
				run(t, "ip -n "+n+" link set eth0 up")
			}
			binary, err := compileSockets()
			require.NoError(t, err)
			cmd := exec.Command("ip", "netns", "exec", inside, binary, "plain", "8080")
			cmd.Env = append(os.Environ(), "EVERYWHERE=1")
			cmd.Stderr = os.Stderr
			out, err := cmd.StdoutPipe()
			require.NoError(t, err)
			require.NoError(t, cmd.Start())
			t.Cleanup(func() {
				_ = cmd.Process.Kill()
				_ = cmd.Wait()
			})
			line, err := bufio.NewReader(out).ReadString('\n')
			require.NoError(t, err)
			require.Equal(t, "ready\n", line)
			s := &server{t: t, cmd: cmd, addr: "10.77.0.1:8080", port: 8080, file: binary}
			w := observe(t, probe.Config{}, s)
			require.NoError(t, w.probe.AddPort(netNS(t, strconv.Itoa(cmd.Process.Pid)), s.port))

			conn := dialIn(t, outside, s.addr)
			exchange(t, conn, "/sleep?60")
			n := exchange(t, conn, "/big?2048")
			all := w.wait(2)
			for _, r := range all {
				requireWhole(t, &r)
				assert.Empty(t, r.Missing, describe(&r))
				assert.Equal(t, []byte{10, 77, 0, 1}, r.Peer.LocalAddr[:4])
				assert.Equal(t, []byte{10, 77, 0, 2}, r.Peer.RemoteAddr[:4])
			}
			assert.Equal(t, "wait", top(&all[0], stage.Wait).String(), describe(&all[0]))
			assert.Less(t, int64(all[0].End-all[0].Start), 2*delayMS*ms, describe(&all[0]))
			assert.Equal(t, n, all[1].BytesOut)

			// 128 KiB at 1 MiB/s: the container's own queue holds them back
			run(t, "tc -n "+inside+" qdisc add dev eth0 root tbf rate 8mbit burst 16kb latency 500ms")
			begin := time.Now()
			n = exchange(t, conn, "/big?128")
			took := time.Since(begin).Nanoseconds()
			require.Greater(t, took, 80*ms, "the queue holds nothing back")
			r := &w.wait(3)[2]
			requireWhole(t, r)
			assert.Equal(t, n, r.BytesOut)
			t.Logf("client %v: %s", time.Duration(took), describe(r))
			held := r.Exclusive[stage.Qdisc] + r.Exclusive[stage.SendBuffer]
			assert.Greater(t, float64(held), tolerance*float64(80*ms), describe(r))
			assert.LessOrEqual(t, int64(r.End-r.Start), took+ms, describe(r))
			assert.Greater(t, r.Plain[stage.Qdisc], 20*ms, describe(r))
		})
	}
}
