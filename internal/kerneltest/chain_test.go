//go:build linux

package kerneltest

import (
	"fmt"
	"os"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"golang.org/x/sys/unix"

	"github.com/ebpfllm/ebpfllm/internal/assemble"
	"github.com/ebpfllm/ebpfllm/internal/probe"
	"github.com/ebpfllm/ebpfllm/internal/process"
	"github.com/ebpfllm/ebpfllm/internal/stage"
)

// startEngines starts testdata/server.c with two engine processes and a broker
// that it reaches over the transport.
func startEngines(t *testing.T, transport string, loop bool) *server {
	t.Helper()
	return startC(t, loop, "-engine", transport)
}

// child returns the process of that name that the server has started.
func (s *server) child(name string) uint32 {
	s.t.Helper()
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%d/children", s.pid(), s.pid()))
	require.NoError(s.t, err)
	for field := range strings.FieldsSeq(string(b)) {
		comm, err := os.ReadFile("/proc/" + field + "/comm")
		require.NoError(s.t, err)
		if strings.TrimSpace(string(comm)) == name {
			pid, err := strconv.ParseUint(field, 10, 32)
			require.NoError(s.t, err)
			return uint32(pid)
		}
	}
	require.FailNow(s.t, "no such child", "%s among %s", name, b)
	return 0
}

// observeEngines watches the server and its children.
func observeEngines(t *testing.T, s *server, others ...*server) *watch {
	t.Helper()
	w := observe(t, probe.Config{}, append(others, s)...)
	for _, name := range []string{"engine0", "engine1", "broker"} {
		require.NoError(t, w.probe.Track(s.child(name), probe.Tracking{}))
	}
	return w
}

// burnEngine keeps the engine's processor busy.
func burnEngine(t *testing.T, s *server) func() {
	t.Helper()
	engine := s.child("engine0")
	stop := burn(t, engine)
	return func() {
		stop()
		setAffinity(t, engine, runtime.NumCPU())
	}
}

// What the engine does to a job, and the stage that the request must get for it.
var engineFaults = []fault{
	{name: "computation is cpu", path: "cpu?60", want: stage.CPU, least: delayMS * ms},
	{name: "an evicted mapping is page_fault", path: "map", cause: evicted, want: stage.PageFault},
	{name: "fresh memory is page_fault", path: "touch?256", want: stage.PageFault},
	{name: "a stolen processor is run_queue", path: "cpu?200", cause: burnEngine, want: stage.RunQueue, least: 80 * ms},
	{name: "a contended mutex is lock", path: "lock?60", want: stage.Lock, least: delayMS * ms},
	{name: "a cold buffered read is page_cache", path: "read", cause: evicted, want: stage.PageCache},
	{name: "sleep stays wait", path: "sleep?60", want: stage.Wait, least: delayMS * ms},
}

func sum(times stage.Times) (ns int64) {
	for _, v := range times {
		ns += v
	}
	return ns
}

func TestAWaitIsSplitByWhatTheEngineDid(t *testing.T) {
	requireRoot(t)
	for _, c := range []struct{ shape, hops string }{
		{"unix", "engine0"},
		{"unix", "engine2"}, // through a broker
		{"futex", "engine0"},
		{"tcp", "engine0"},
		{"unix loop", "engine0"},
		{"tcp loop", "engine0"},
		{"tcp loop", "engine2"},
	} {
		t.Run(c.shape+" "+c.hops, func(t *testing.T) {
			transport, _, loop := strings.Cut(c.shape, " ")
			s := startEngines(t, transport, loop)
			w := observeEngines(t, s)
			s.get("/" + c.hops + "/sleep?1") // pages in the processes; each has been off a CPU since it is watched
			for i, f := range engineFaults {
				t.Run(f.name, func(t *testing.T) {
					s.t, w.t = t, t
					if f.cause != nil {
						defer f.cause(t, s)()
					}
					s.get("/" + c.hops + "/" + f.path)
					r := &w.wait(2 + i)[1+i]
					requireWhole(t, r)
					assertTop(t, r, &f)
					if f.want == stage.Wait {
						return
					}
					assertOnWaker(t, r, w.of(r), &f, s.child("engine0"))
					wall := float64(r.End - r.Start)
					assert.Less(t, float64(r.Exclusive[stage.Wait]+r.Exclusive[stage.Unattributed]), 0.1*wall+float64(2*ms), describe(r))
					if f.want == stage.PageFault && f.cause != nil {
						assert.Greater(t, r.MajorFault, r.Exclusive[f.want]/2, describe(r))
					}
				})
			}
		})
	}
}

// assertTop checks that the stage is the request's largest, or that nobody is
// blamed for a wait.
func assertTop(t *testing.T, r *assemble.Request, f *fault) {
	t.Helper()
	if f.want == stage.CPU && r.Exclusive[stage.RunQueue] > 20*ms {
		t.Log("others had the processor meanwhile: ", describe(r))
	} else {
		assert.Equal(t, f.want.String(), top(r, f.want).String(), describe(r))
	}
	if f.want == stage.Wait {
		assert.GreaterOrEqual(t, float64(r.Exclusive[stage.Wait]), tolerance*float64(f.least), describe(r))
		assert.Less(t, sum(r.Waker)-r.Waker[stage.RunQueue], 10*ms, "sleeping is nobody's stall: "+describe(r))
	}
}

// assertOnWaker checks that the stage is the engine's, in the totals and in the
// stretches that are told piece by piece.
func assertOnWaker(t *testing.T, r *assemble.Request, list []assemble.Occurrence, f *fault, engine uint32) {
	t.Helper()
	got := r.Waker[f.want]
	if f.want == stage.CPU {
		got += r.Waker[stage.RunQueue] // the engine looks at the clock, and the machine is shared
	}
	assert.GreaterOrEqual(t, float64(got), tolerance*float64(f.least), describe(r))
	if f.want != stage.RunQueue && f.want != stage.CPU { // of these, the serving thread has some of its own
		assert.Greater(t, float64(r.Waker[f.want]), 0.9*float64(r.Exclusive[f.want]), describe(r))
	}
	var told int64
	for _, o := range list {
		if o.Stage != f.want || !o.Waker {
			continue
		}
		if o.PID == engine {
			told += o.Duration
		} else if o.Stage != stage.RunQueue { // the machine is shared: whoever is in between may have to queue, too
			assert.Fail(t, "told of another process", "%+v", o)
		}
	}
	// many short ones, with much else in between, have no place of their own: see sparse in internal/assemble
	if f.want.Stall() && r.Waker[f.want] > max(20*ms, int64(r.End-r.Start)/3) {
		assert.Greater(t, told, r.Waker[f.want]/2, "%+v %s", list, describe(r))
	}
}

// Two requests wait in one event loop: only the one whose engine stalls is told
// of the stall.
func TestAnEngineStallIsNotBlamedOnOtherRequestsOfTheLoop(t *testing.T) {
	requireRoot(t)
	for _, other := range []string{"/timer?120", "/engine1/sleep?120", "/timer?20", "/engine1/sleep?20"} {
		for _, transport := range []string{"unix", "tcp"} {
			t.Run(transport+" beside "+other, func(t *testing.T) {
				s := startEngines(t, transport, true)
				w := observeEngines(t, s)
				s.get("/engine0/sleep?1")
				s.get("/engine1/sleep?1")
				done := make(chan struct{})
				go func() { s.get(other); close(done) }()
				s.get("/engine0/lock?60")
				<-done
				all := w.wait(4)
				var affected, unaffected *assemble.Request
				for i := range all {
					switch path := all[i].Head.Path; {
					case path == "/engine0/lock":
						affected = &all[i]
					case i >= 2 && strings.HasPrefix(other, path):
						unaffected = &all[i]
					}
				}
				require.NotNil(t, affected)
				require.NotNil(t, unaffected)
				requireWhole(t, affected)
				requireWhole(t, unaffected)
				assert.Equal(t, "lock", top(affected, stage.Lock).String(), describe(affected))
				assert.Greater(t, float64(affected.Waker[stage.Lock]), tolerance*delayMS*float64(ms), describe(affected))
				assert.Less(t, unaffected.Waker[stage.Lock], ms, describe(unaffected))
				for _, o := range w.of(unaffected) {
					assert.False(t, o.Waker && o.Stage == stage.Lock, "%+v", o)
				}
			})
		}
	}
}

// A timer fires while an engine computes on the same processor: the interrupt
// wakes in the engine's name.
func TestATimerIsNotTheThreadThatItInterrupts(t *testing.T) {
	requireRoot(t)
	for _, loop := range []bool{false, true} {
		t.Run(fmt.Sprintf("loop=%v", loop), func(t *testing.T) {
			s := startEngines(t, "unix", loop)
			w := observeEngines(t, s)
			s.get("/engine0/sleep?1")
			engine := s.child("engine0")
			pin(t, s.pid())
			pin(t, engine)
			before := cpuTime(t, engine)
			done := make(chan struct{})
			go func() { s.get("/engine0/cpu?400"); close(done) }()
			require.Eventually(t, func() bool { return cpuTime(t, engine) > before+10*ms }, 5*time.Second, time.Millisecond)
			path := "/sleep?60"
			if loop {
				path = "/timer?60"
			}
			s.get(path)
			select {
			case <-done:
				require.FailNow(t, "the engine had ended before the timer")
			default:
			}
			<-done
			var r *assemble.Request
			for _, f := range w.wait(3) {
				if strings.HasPrefix(path, f.Head.Path) {
					r = &f
				}
			}
			require.NotNil(t, r)
			requireWhole(t, r)
			assert.Equal(t, "wait", top(r, stage.Wait).String(), describe(r))
			assert.GreaterOrEqual(t, float64(r.Exclusive[stage.Wait]), tolerance*delayMS*float64(ms), describe(r))
			assert.Zero(t, sum(r.Waker), describe(r))
		})
	}
}

// pin leaves a process one processor.
func pin(t *testing.T, pid uint32) {
	t.Helper()
	setAffinity(t, pid, 1)
}

// setAffinity leaves a process the first n processors.
func setAffinity(t *testing.T, pid uint32, n int) {
	t.Helper()
	var cpu unix.CPUSet
	for i := range n {
		cpu.Set(i)
	}
	require.NoError(t, process.EachThread(int(pid), func(tid int) error { return unix.SchedSetaffinity(tid, &cpu) }))
}

// A goroutine waits for an engine on a Unix socket.
func TestAGoroutinesWaitIsSplitByWhatTheEngineDid(t *testing.T) {
	requireRoot(t)
	engines := startEngines(t, "unix", false)
	s := startGo(t, fmt.Sprintf("%s=@ebpfllm-engine-%d-0", engineEnv, engines.port))
	w := observeEngines(t, engines, s)
	s.get("/engine/sleep?1")
	for i, f := range engineFaults {
		t.Run(f.name, func(t *testing.T) {
			engines.t, s.t, w.t = t, t, t
			if f.cause != nil {
				defer f.cause(t, engines)()
			}
			s.get("/engine/" + f.path)
			r := &w.wait(2 + i)[1+i]
			requireWhole(t, r)
			assertTop(t, r, &f)
			if f.want != stage.Wait {
				assertOnWaker(t, r, w.of(r), &f, engines.child("engine0"))
			}
		})
	}
}
