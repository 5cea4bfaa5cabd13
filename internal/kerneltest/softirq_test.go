//go:build linux

package kerneltest

import (
	"bufio"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"runtime"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/cilium/ebpf"
	"github.com/cilium/ebpf/asm"
	"github.com/cilium/ebpf/btf"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/ebpfllm/ebpfllm/internal/probe"
)

// noSoftirqs returns a function that keeps softirqs from running on its thread's
// CPU for about the time: the kernel turns them off while it runs a program for a
// test, and this one counts.
func noSoftirqs(t *testing.T, d time.Duration) func() error {
	t.Helper()
	load := func(n int64) func() error {
		p, err := ebpf.NewProgram(&ebpf.ProgramSpec{Type: ebpf.SocketFilter, License: "MIT", Instructions: counting(n)})
		require.NoError(t, err)
		t.Cleanup(func() { _ = p.Close() })
		return func() error {
			_, err := p.Run(&ebpf.RunOptions{Data: make([]byte, 64)})
			return err
		}
	}
	const sample = 200
	run := load(sample)
	start := time.Now()
	require.NoError(t, run())
	return load(int64(sample * d.Seconds() / time.Since(start).Seconds()))
}

// counting is a program that calls a function n times, at most 1<<23, which does
// so with an empty one 4096 times.
func counting(n int64) asm.Instructions {
	integer := &btf.Int{Name: "int", Size: 4, Encoding: btf.Signed}
	function := func(in asm.Instruction, name string) asm.Instruction {
		params := []btf.FuncParam{{Name: "i", Type: integer}, {Name: "context", Type: &btf.Pointer{Target: &btf.Void{}}}}
		if name == "main" {
			params = params[1:]
		}
		return btf.WithFuncMetadata(in.WithSymbol(name), &btf.Func{Name: name, Type: &btf.FuncProto{Return: integer, Params: params}, Linkage: btf.StaticFunc})
	}
	call := func(name string) asm.Instructions {
		f := asm.LoadImm(asm.R2, -1, asm.DWord).WithReference(name)
		f.Src = asm.PseudoFunc
		return asm.Instructions{f, asm.Mov.Imm(asm.R3, 0), asm.Mov.Imm(asm.R4, 0), asm.FnLoop.Call(), asm.Mov.Imm(asm.R0, 0), asm.Return()}
	}
	program := append(asm.Instructions{function(asm.LoadImm(asm.R1, n, asm.DWord), "main")}, call("outer")...)
	program = append(program, function(asm.Mov.Imm(asm.R1, 4096), "outer"))
	program = append(program, call("inner")...)
	return append(program, function(asm.Mov.Imm(asm.R0, 0), "inner"), asm.Return())
}

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

	hog := noSoftirqs(t, 80*time.Millisecond)
	var late time.Duration
	try := 1
	for ; late < 20*time.Millisecond; try++ { // others of the machine may have had CPU 1
		require.LessOrEqual(t, try, 10, "softirqs were never kept from CPU 1")
		var running atomic.Bool
		ended := make(chan error)
		go func() {
			runtime.LockOSThread()
			err := pinThread(1)
			running.Store(true)
			ended <- errors.Join(err, hog())
		}()
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
