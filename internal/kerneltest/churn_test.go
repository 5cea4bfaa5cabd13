//go:build linux && amd64

package kerneltest

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/collector/component"
	"go.opentelemetry.io/collector/component/componenttest"
	"go.opentelemetry.io/collector/consumer/consumertest"
	"go.opentelemetry.io/collector/receiver/receivertest"
	"go.uber.org/goleak"

	"github.com/ebpfllm/ebpfllm/internal/assemble"
	"github.com/ebpfllm/ebpfllm/receiver/ebpfllmreceiver"
)

// Processes and threads that come and go, and receivers that do.

// heap is what is in use after a collection, in bytes.
func heap() int64 {
	var m runtime.MemStats
	runtime.GC()
	runtime.GC() // what finalizers kept
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// requireAccount checks that each record that the kernel side made was read or counted as lost.
func (c *collector) requireAccount() {
	c.t.Helper()
	var sent, records map[string]int64
	if !assert.Eventually(c.t, func() bool {
		sent, records = c.points("records_sent"), c.points("records")
		lost := c.points("records_lost")
		for kind, n := range sent {
			if n != records[kind]+lost["ring_full_"+kind] {
				return false
			}
		}
		return len(sent) > 0
	}, 5*time.Second, 50*time.Millisecond) {
		require.FailNow(c.t, "records are missing", "sent %v, read %v, lost %v", sent, records, c.points("records_lost"))
	}
}

func TestTenThousandProcessesOfATargetLeaveNothing(t *testing.T) {
	requireRoot(t)
	// each child is a process; every tenth executes another program
	script := `read line; i=0; while [ $i -lt $line ]; do i=$((i+1)); if [ $((i%10)) = 0 ]; then /bin/true; else (:); fi; done; echo done; read line; i=0; while [ $i -lt $line ]; do i=$((i+1)); if [ $((i%10)) = 0 ]; then /bin/true; else (:); fi; done; echo done; read line`
	shell := exec.Command("sh", "-c", script)
	in, err := shell.StdinPipe()
	require.NoError(t, err)
	out, err := shell.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, shell.Start())
	defer func() {
		_ = shell.Process.Kill()
		_ = shell.Wait()
	}()
	c := collect(t, ebpfllmreceiver.TargetConfig{PID: shell.Process.Pid})
	c.awaitTargets(1)
	churn := func(n int) {
		_, err := fmt.Fprintln(in, n)
		require.NoError(t, err)
		var answer string
		_, err = fmt.Fscan(out, &answer)
		require.NoError(t, err)
		c.awaitTargets(1)
	}
	churn(500) // what is made once is made
	before := heap()
	churn(10_000)
	c.requireAccount()
	assert.GreaterOrEqual(t, c.points("records")["process"], int64(2*10_500), "each was seen to come and to go: read %v, sent %v, lost %v, full %v, missed %v",
		c.points("records"), c.points("records_sent"), c.points("records_lost"), c.points("map_full"), c.points("programs_missed"))
	assert.Less(t, heap()-before, int64(1<<20), "the receiver's memory is flat")
	assert.Equal(t, 1, entries(t, "processes"))
	assert.Zero(t, entries(t, "lanes"))
	assert.Zero(t, c.number("map_full"))
}

func TestTenThousandThreadsOfATargetLeaveNothing(t *testing.T) {
	requireRoot(t)
	s := startCIn(t) // a thread for each connection
	c := collect(t, targetC(t))
	c.awaitTargets(1)
	client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: 30 * time.Second}
	idle, err := threadStates(s.pid())
	require.NoError(t, err)
	seen := 0
	churn := func(n int) {
		var group sync.WaitGroup
		for range 4 {
			group.Go(func() {
				for range n / 4 {
					r, err := client.Get("http://" + s.addr + "/")
					if assert.NoError(t, err) {
						_ = r.Body.Close()
					}
				}
			})
		}
		group.Wait()
		seen += n
		require.Eventually(t, func() bool { return c.sink.SpanCount() >= seen && len(c.all()) >= seen }, 20*time.Second, 200*time.Millisecond, "requests are missing")
	}
	churn(400)
	c.sink.Reset()
	seen = 0
	before := heap()
	churn(10_000)
	byPID := map[int64]int{}
	for _, r := range c.all() {
		byPID[r.pid()]++
	}
	assert.Equal(t, map[int64]int{int64(s.pid()): 10_000}, byPID, "a request for each")
	c.sink.Reset()
	c.requireAccount()
	assert.Less(t, heap()-before, int64(4<<20), "the receiver's memory is flat")
	assert.Eventually(t, func() bool { // the last threads end after their answers
		states, err := threadStates(s.pid())
		return err == nil && len(states) == len(idle)
	}, 5*time.Second, 10*time.Millisecond)
	assert.Zero(t, entries(t, "lanes"))
	assert.Zero(t, c.number("map_full"))
}

// awaitListening returns once the server can be reached.
func (s *server) awaitListening() {
	s.t.Helper()
	require.Eventually(s.t, func() bool {
		conn, err := net.Dial("tcp", s.addr)
		if err == nil {
			conn.Close()
		}
		return err == nil
	}, 5*time.Second, 5*time.Millisecond, "the server does not listen")
}

// giveOutNext has the kernel give out pid next, if nobody comes in between.
func giveOutNext(t *testing.T, pid uint32) {
	t.Helper()
	require.NoError(t, os.WriteFile("/proc/sys/kernel/ns_last_pid", []byte(strconv.Itoa(int(pid-1))), 0o644))
}

func TestAPidGivenOutAgainAtOnceIsTheNewProcess(t *testing.T) {
	requireRoot(t)
	if _, err := os.Stat("/proc/sys/kernel/ns_last_pid"); err != nil {
		t.Skipf("needs CONFIG_CHECKPOINT_RESTORE to choose a pid: %v", err)
	}
	binary, err := compile()
	require.NoError(t, err)
	name := filepath.Base(binary)

	t.Run("another program that matches too", func(t *testing.T) {
		c := collect(t, ebpfllmreceiver.TargetConfig{Executable: name}, ebpfllmreceiver.TargetConfig{Executable: filepath.Base(os.Args[0])})
		first := startCIn(t)
		c.awaitTargets(1)
		first.ask("/first", traceparent)
		old := &c.to("/first", 1)[0]
		require.Equal(t, name, old.Resource["process.executable.name"])
		var second *server
		require.Eventually(t, func() bool { // until nobody took the pid first
			require.NoError(t, first.cmd.Process.Kill())
			_ = first.cmd.Wait()
			giveOutNext(t, first.pid())
			second = startGo(t)
			if second.pid() == first.pid() {
				return true
			}
			first = second
			return false
		}, 10*time.Second, time.Millisecond)
		second.awaitListening()
		// what was accepted before the new process was found is not whole, but no less its own
		whole := 0
		for i := 0; whole == 0; i++ {
			require.Less(t, i, 200, "the new process is not seen")
			second.ask("/second", traceparent)
			time.Sleep(20 * time.Millisecond)
			for _, r := range c.all()[1:] {
				assert.Equal(t, int64(second.pid()), r.pid())
				assert.Equal(t, filepath.Base(os.Args[0]), r.Resource["process.executable.name"])
				if r.Attributes["ebpfllm.incomplete"] == false {
					requireLinked(t, &r)
					whole++
				}
			}
		}
	})

	// The kernel side watches a child from its first moment, and user space hears of
	// the old one's end only after that.
	t.Run("a child of a target", func(t *testing.T) {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		require.NoError(t, err)
		_, port, err := net.SplitHostPort(l.Addr().String())
		require.NoError(t, err)
		require.NoError(t, l.Close())
		shell := exec.Command("sh", "-c", `read line
			while :; do
				sleep 60 & first=$!
				kill -9 $first; wait $first
				echo $((first-1)) >/proc/sys/kernel/ns_last_pid
				"$0" "$1" /dev/null >/dev/null & second=$!
				[ $first = $second ] && break
				kill -9 $second; wait $second
			done
			echo $second; wait`, binary, port)
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
		c := collect(t, ebpfllmreceiver.TargetConfig{PID: shell.Process.Pid})
		c.awaitTargets(1)
		_, err = fmt.Fprintln(in, "go")
		require.NoError(t, err)
		var pid int64
		_, err = fmt.Fscan(out, &pid)
		require.NoError(t, err)
		s := &server{t: t, addr: "127.0.0.1:" + port}
		s.awaitListening()
		c.awaitTargets(2)
		s.ask("/lock?60", traceparent)
		r := &c.to("/lock", 1)[0]
		requireLinked(t, r)
		assert.Equal(t, pid, r.pid())
		assert.Equal(t, filepath.Base(binary), r.Resource["process.executable.name"])
		assert.Greater(t, r.stage(t, "lock"), tolerance*0.06)
	})
}

// A process is another server after each exec: what was known of the old program
// is not said of the new one, and what it left in the maps is removed.
func TestAProcessThatExecutesAnotherServerInPlace(t *testing.T) {
	requireRoot(t)
	binary, err := compile()
	require.NoError(t, err)
	s := start(t, func(p string) *exec.Cmd {
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), serveEnv+"=127.0.0.1:"+p,
			"EXEC1=exec '"+binary+"' "+p+" /dev/null >&2", "EXEC2=exec '"+os.Args[0]+"' >&2")
		return cmd
	})
	c := collect(t, ebpfllmreceiver.TargetConfig{PID: int(s.pid())})
	c.awaitTargets(1)
	executable := func() string { // none while the kernel exchanges it
		link, _ := os.Readlink("/proc/" + strconv.Itoa(int(s.pid())) + "/exe")
		return filepath.Base(link)
	}
	programs := [2]string{filepath.Base(os.Args[0]), filepath.Base(binary)}
	for i := range 6 {
		program, next, stall := programs[i%2], programs[(i+1)%2], [2]string{"/sleep", "/lock"}[i%2]
		require.Equal(t, program, executable())
		path := "/" + strconv.Itoa(i)
		s.ask(path, traceparent)
		r := &c.to(path, 1)[0]
		requireLinked(t, r)
		assert.Equal(t, int64(s.pid()), r.pid())
		assert.Equal(t, program, r.Resource["process.executable.name"])
		s.ask(stall+"?60", traceparent)
		r = &c.to(stall, i/2+1)[i/2]
		requireLinked(t, r)
		if stall == "/lock" {
			assert.Greater(t, r.stage(t, "lock"), tolerance*0.06, "%v", r.Attributes)
		} else {
			assert.Greater(t, r.stage(t, "wait"), tolerance*0.06, "a goroutine on no thread: %v", r.Attributes)
		}
		// the request that asks for it is never answered
		client := http.Client{Transport: &http.Transport{DisableKeepAlives: true}, Timeout: 10 * time.Second}
		_, err := client.Get(fmt.Sprintf("http://%s/exec?%d", s.addr, i%2+1))
		require.Error(t, err)
		require.Eventually(t, func() bool { return executable() == next }, 5*time.Second, 5*time.Millisecond, "the next program does not come up")
		s.awaitListening()
	}
	require.NoError(t, s.cmd.Process.Kill())
	_ = s.cmd.Wait()
	c.awaitTargets(0)
	assert.Zero(t, entries(t, "lanes"), "of goroutines and threads of all the programs")
	assert.Zero(t, entries(t, "processes"))
}

func TestTargetsThatStartBeforeAndAfterTheReceiver(t *testing.T) {
	requireRoot(t)
	before := startCIn(t)
	kept, err := net.Dial("tcp", before.addr) // older than the receiver as well
	require.NoError(t, err)
	defer kept.Close()
	c := collect(t, targetC(t))
	after := startCIn(t)
	c.awaitTargets(2)
	for i, s := range []*server{before, after} {
		s.ask("/lock?60", traceparent)
		r := &c.to("/lock", i+1)[i]
		requireLinked(t, r)
		assert.Equal(t, int64(s.pid()), r.pid())
		assert.Greater(t, r.stage(t, "lock"), tolerance*0.06)
	}
	in := bufio.NewReader(kept)
	for i := range 2 {
		write(t, kept, "/kept")
		answer, err := http.ReadResponse(in, nil)
		require.NoError(t, err)
		_, err = io.Copy(io.Discard, answer.Body)
		require.NoError(t, err)
		r := &c.to("/kept", i+1)[i]
		assert.Equal(t, int64(before.pid()), r.pid())
		if i == 0 { // nobody saw it come
			assert.Equal(t, []any{assemble.IncompleteArrival}, r.Attributes["ebpfllm.incomplete.reasons"])
		} else {
			assert.Equal(t, false, r.Attributes["ebpfllm.incomplete"])
		}
	}
}

func TestFiveHundredTargets(t *testing.T) {
	requireRoot(t)
	const n = 500
	servers := make([]*server, 0, n)
	for range n / 2 {
		servers = append(servers, startCIn(t))
	}
	c := collect(t, targetC(t))
	for range n - n/2 {
		servers = append(servers, startCIn(t))
	}
	c.awaitTargets(n)
	for i, s := range servers {
		s.ask("/"+strconv.Itoa(i), traceparent)
	}
	require.Eventually(t, func() bool { return c.sink.SpanCount() >= n && len(c.all()) >= n }, 10*time.Second, 50*time.Millisecond)
	requests := c.all()
	require.Len(t, requests, n)
	for i := range requests {
		r := &requests[i]
		requireLinked(t, r)
		index, err := strconv.Atoi(r.path()[1:])
		require.NoError(t, err)
		assert.Equal(t, int64(servers[index].pid()), r.pid())
		assert.Equal(t, int64(servers[index].port), r.Attributes["server.port"])
	}
	c.requireAccount()
	full := c.points("map_full")
	delete(full, "threads") // a burst of new threads finds no memory ready: such a one is tracked when it reads, as the requests above show
	for name, n := range full {
		assert.Zero(t, n, name)
	}
	for _, s := range servers {
		require.NoError(t, s.cmd.Process.Kill())
	}
	c.awaitTargets(0)
	assert.Zero(t, entries(t, "processes"))
	assert.Zero(t, entries(t, "lanes"))
}

// pinned lists what is pinned in the BPF file system.
func pinned(t *testing.T) (list []string) {
	t.Helper()
	require.NoError(t, filepath.WalkDir("/sys/fs/bpf", func(path string, _ os.DirEntry, err error) error {
		list = append(list, path)
		return err
	}))
	return list
}

func TestAReceiverRestartedAHundredTimesLeavesNothing(t *testing.T) {
	requireRoot(t)
	s := startCIn(t)
	pins := pinned(t)
	files, goroutines, before := 0, 0, int64(0)
	var ours held
	for i := range 101 {
		if i == 1 { // what is made once is made
			files, goroutines, before = openFiles(t), runtime.NumGoroutine(), heap()
		}
		sink := &consumertest.TracesSink{}
		r, err := newReceiver(receivertest.NewNopSettings(component.MustNewType("ebpfllm")), sink, targetC(t))
		require.NoError(t, err)
		require.NoError(t, r.Start(t.Context(), componenttest.NewNopHost()))
		if i == 1 || i == 100 {
			now := holds(t)
			ours.programs = append(ours.programs, now.programs...)
			ours.maps = append(ours.maps, now.maps...)
			ours.links = append(ours.links, now.links...)
		}
		s.ask("/", traceparent)
		require.NoError(t, r.Shutdown(context.Background()))
		seen := 0
		for _, batch := range sink.AllTraces() {
			seen += len(requestsIn(batch))
		}
		assert.Equal(t, 1, seen, "start %d", i)
	}
	assert.Equal(t, files, openFiles(t))
	assert.LessOrEqual(t, runtime.NumGoroutine(), goroutines)
	assert.Less(t, heap()-before, int64(1<<20))
	assert.Equal(t, pins, pinned(t))
	assert.Empty(t, holds(t))
	assert.Eventually(t, func() bool { return ours.left() == 0 }, 5*time.Second, 20*time.Millisecond)
	goleak.VerifyNone(t, goleak.IgnoreTopFunction("os/exec.(*Cmd).watchCtx"))
}

func TestAReceiverThatIsKilledLeavesNothingAndTheNextOneIsRight(t *testing.T) {
	requireRoot(t)
	s := startCIn(t)
	pins := pinned(t)
	p := collectElsewhere(t, targetC(t).Executable)
	ours := heldBy(t, strconv.Itoa(p.cmd.Process.Pid))
	require.Greater(t, len(ours.programs), 15)
	require.Greater(t, len(ours.maps), 8)
	require.Greater(t, len(ours.links), 5)
	// in the middle of its work: of a request, on a connection that is kept
	conn, err := net.Dial("tcp", s.addr)
	require.NoError(t, err)
	defer conn.Close()
	in := bufio.NewReader(conn)
	answered := func() {
		r, err := http.ReadResponse(in, nil)
		require.NoError(t, err)
		_, err = io.Copy(io.Discard, r.Body)
		require.NoError(t, err)
	}
	write(t, conn, "/sleep?500")
	require.NoError(t, p.cmd.Process.Kill())
	_ = p.cmd.Wait()
	assert.Eventually(t, func() bool { return ours.left() == 0 }, 5*time.Second, 20*time.Millisecond)
	assert.Equal(t, pins, pinned(t))

	c := collect(t, targetC(t))
	answered() // a request of before
	write(t, conn, "/cpu?1")
	answered() // the first that is seen on it: nobody saw it come
	assert.Equal(t, []any{assemble.IncompleteArrival}, c.to("/cpu", 1)[0].Attributes["ebpfllm.incomplete.reasons"])
	write(t, conn, "/lock?60")
	answered()
	r := &c.to("/lock", 1)[0]
	assert.Equal(t, false, r.Attributes["ebpfllm.incomplete"])
	assert.Greater(t, r.stage(t, "lock"), tolerance*0.06)
	for range 3 {
		s.ask("/new", traceparent)
	}
	for _, r := range c.to("/new", 3) {
		requireLinked(t, &r)
	}
}
