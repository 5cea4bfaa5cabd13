package target

import (
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// say words changes: "+5" a target, "?5" a candidate, "-5" no longer watched,
// ":80" a port.
func say(changes []Change) []string {
	out := []string{}
	for _, c := range changes {
		switch {
		case c.Track != nil && c.Track.Candidate:
			out = append(out, fmt.Sprintf("?%d", c.Track.PID))
		case c.Track != nil:
			out = append(out, fmt.Sprintf("+%d", c.Track.PID))
		case c.Port != nil:
			out = append(out, fmt.Sprintf(":%d", c.Port.Port))
		default:
			out = append(out, fmt.Sprintf("-%d", c.Untrack))
		}
	}
	return out
}

func rescan(t *testing.T, w *Watcher) []string {
	t.Helper()
	changes, err := w.Rescan()
	require.NoError(t, err)
	return say(changes)
}

func TestRulesAreAndedWithinAndOredBetween(t *testing.T) {
	f := newFakeProc(t)
	f.put(2, fakeProcess{start: 1, exe: "/usr/bin/python3", args: []string{"python3", "-m", "vllm.entrypoints.openai.api_server"}, ports: []uint16{8000}})
	f.put(3, fakeProcess{start: 2, exe: "/usr/bin/python3", args: []string{"python3", "other.py"}, ports: []uint16{9000}})
	f.put(4, fakeProcess{start: 3, exe: "/opt/llama-server", args: []string{"llama-server"}, ports: []uint16{8080}})
	f.put(5, fakeProcess{start: 4}) // a kernel thread

	vllm := regexp.MustCompile(`vllm\.entrypoints`)
	for _, tt := range []struct {
		name  string
		rules []Rule
		want  []string
	}{
		{"executable", []Rule{{Executable: "python3"}}, []string{"+2", ":8000", "+3", ":9000"}},
		{"path", []Rule{{Executable: "/opt/llama-server"}}, []string{"+4", ":8080"}},
		{"another path", []Rule{{Executable: "/bin/llama-server"}}, []string{}},
		{"command line", []Rule{{CommandLine: vllm}}, []string{"+2", ":8000"}},
		{"port", []Rule{{Ports: []uint16{1, 9000}}}, []string{"+3", ":9000"}},
		{"pid", []Rule{{PID: 4}}, []string{"+4", ":8080"}},
		{"and", []Rule{{Executable: "python3", Ports: []uint16{8080}}}, []string{}},
		{"or", []Rule{{CommandLine: vllm}, {PID: 4}}, []string{"+2", ":8000", "+4", ":8080"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			w := NewWatcher(f.proc(), tt.rules, 1)
			assert.Equal(t, tt.want, rescan(t, w))
			var ports []string
			for _, s := range tt.want {
				if s[0] == ':' {
					ports = append(ports, s)
				}
			}
			assert.ElementsMatch(t, ports, rescan(t, w), "nothing changed, and the ports are told again")
		})
	}
}

func TestTheWholeTreeOfATargetIsWatched(t *testing.T) {
	f := newFakeProc(t)
	f.put(30, fakeProcess{parent: 1, start: 10, exe: "/bin/api"})
	f.put(20, fakeProcess{parent: 30, start: 11, exe: "/bin/engine"}) // a smaller pid than its parent
	f.put(40, fakeProcess{parent: 20, start: 12, exe: "/bin/worker"})
	f.put(50, fakeProcess{parent: 1, start: 5, exe: "/bin/other"})
	w := NewWatcher(f.proc(), []Rule{{Executable: "api"}}, 1)
	assert.Equal(t, []string{"+30", "+20", "+40"}, rescan(t, w))

	f.put(41, fakeProcess{parent: 20, start: 13, exe: "/bin/engine"})
	assert.Equal(t, []string{"+41"}, say(w.Served(41)), "a forked child is found by what it does")
	assert.Empty(t, say(w.Served(41)))
	f.put(41, fakeProcess{parent: 20, start: 13, exe: "/bin/tool"})
	assert.Empty(t, say(w.Exec(41)), "another program, still in the tree")
	p, _ := w.Process(41)
	assert.Equal(t, "tool", p.ServiceName)

	f.remove(20)
	assert.Equal(t, []string{"-20"}, say(w.Exit(20)))
	f.put(40, fakeProcess{parent: 1, start: 12, exe: "/bin/worker"}) // an orphan
	assert.Empty(t, rescan(t, w), "a worker stays one when its parent ends")

	targets, candidates := w.Targets()
	assert.Equal(t, 3, targets)
	assert.Zero(t, candidates)
}

func TestChildrenOfInitInheritNothing(t *testing.T) {
	f := newFakeProc(t)
	f.put(1, fakeProcess{start: 1, exe: "/sbin/init"})
	f.put(2, fakeProcess{parent: 1, start: 2, exe: "/bin/a"})
	w := NewWatcher(f.proc(), []Rule{{PID: 1}}, 9)
	assert.Equal(t, []string{"+1"}, rescan(t, w))
}

func TestAProcessThatExecutesAnotherProgramIsJudgedAnew(t *testing.T) {
	f := newFakeProc(t)
	f.put(5, fakeProcess{parent: 1, start: 1, exe: "/bin/sh"})
	w := NewWatcher(f.proc(), []Rule{{Executable: "server"}}, 1)
	assert.Empty(t, rescan(t, w))
	f.put(6, fakeProcess{parent: 5, start: 2, exe: "/bin/helper"})
	assert.Empty(t, say(w.Exec(6)))

	f.put(5, fakeProcess{parent: 1, start: 1, exe: "/bin/server", environ: []string{"OTEL_SERVICE_NAME=svc"}})
	changes := w.Exec(5)
	assert.Equal(t, []string{"+5", "+6"}, say(changes), "with the children it had")
	assert.Equal(t, "svc", changes[0].Track.ServiceName)
	p, ok := w.Process(5)
	assert.True(t, ok)
	assert.Equal(t, "svc", p.ServiceName)

	f.put(5, fakeProcess{parent: 1, start: 1, exe: "/bin/sh"})
	assert.Equal(t, []string{"-5"}, say(w.Exec(5)))
	_, ok = w.Process(5)
	assert.False(t, ok)
}

func TestAForkedChildIsWhatItsParentIs(t *testing.T) {
	f := newFakeProc(t)
	f.put(5, fakeProcess{parent: 1, start: 1, exe: "/bin/server", environ: []string{"OTEL_SERVICE_NAME=svc"}})
	f.put(6, fakeProcess{parent: 1, start: 1, exe: "/bin/sshd", ports: []uint16{22}})
	w := NewWatcher(f.proc(), []Rule{{Executable: "server"}}, 1)
	assert.Equal(t, []string{"+5"}, rescan(t, w))
	f.put(7, fakeProcess{parent: 5, start: 2, exe: "/bin/server"})
	w.Fork(7, 5)
	p, ok := w.Process(7)
	require.True(t, ok)
	assert.Equal(t, "svc", p.ServiceName)
	assert.Empty(t, rescan(t, w))
	w.Fork(8, 5) // has ended already
	w.Fork(9, 6) // of a process that is not watched
	targets, _ := w.Targets()
	assert.Equal(t, 2, targets)

	w = NewWatcher(f.proc(), nil, 1)
	assert.Equal(t, []string{"?6", ":22"}, rescan(t, w))
	f.put(10, fakeProcess{parent: 6, start: 3, exe: "/bin/sshd", ports: []uint16{22}})
	w.Fork(10, 6)
	assert.Equal(t, []string{":22"}, rescan(t, w), "a worker that shares the socket")
	f.put(10, fakeProcess{parent: 6, start: 3, exe: "/bin/bash"})
	assert.Equal(t, []string{"-10"}, say(w.Exec(10)), "a session's shell is no candidate")
}

func TestAPidThatIsGivenOutAgainIsAnotherProcess(t *testing.T) {
	f := newFakeProc(t)
	f.put(5, fakeProcess{parent: 1, start: 1, exe: "/bin/server"})
	w := NewWatcher(f.proc(), []Rule{{Executable: "server"}}, 1)
	assert.Equal(t, []string{"+5"}, rescan(t, w))
	f.put(5, fakeProcess{parent: 1, start: 2, exe: "/bin/server"}) // its exit was missed
	assert.Equal(t, []string{"-5", "+5"}, rescan(t, w))
	f.put(5, fakeProcess{parent: 1, start: 3, exe: "/bin/other"})
	assert.Equal(t, []string{"-5"}, rescan(t, w))
	f.put(5, fakeProcess{parent: 1, start: 4, exe: "/bin/server"})
	assert.Equal(t, []string{"+5"}, rescan(t, w))
	f.remove(5)
	assert.Equal(t, []string{"-5"}, rescan(t, w), "a missed exit is noticed")
}

func TestATargetThatDoesNotExistYetIsFoundWhenItComes(t *testing.T) {
	f := newFakeProc(t)
	w := NewWatcher(f.proc(), []Rule{{Executable: "server", Ports: []uint16{80}}, {PID: 77}}, 1)
	assert.Empty(t, rescan(t, w))
	assert.Equal(t, []int{0, 1}, w.Unmatched())

	f.put(5, fakeProcess{parent: 1, start: 1, exe: "/bin/server"})
	assert.Empty(t, say(w.Exec(5)))
	f.put(5, fakeProcess{parent: 1, start: 1, exe: "/bin/server", ports: []uint16{80}})
	assert.Equal(t, []string{"+5", ":80"}, say(w.Listen(5)))
	assert.Equal(t, []int{1}, w.Unmatched())
}

func TestWithoutRulesAServerBecomesATargetWhenAskedForAnLLM(t *testing.T) {
	f := newFakeProc(t)
	f.put(5, fakeProcess{parent: 1, start: 1, exe: "/bin/server", ports: []uint16{80}})
	f.put(6, fakeProcess{parent: 5, start: 2, exe: "/bin/engine"})
	f.put(7, fakeProcess{parent: 1, start: 3, exe: "/bin/sshd", ports: []uint16{22}})
	f.put(8, fakeProcess{parent: 1, start: 4, exe: "/bin/quiet"})
	w := NewWatcher(f.proc(), nil, 99)
	assert.Equal(t, []string{"?5", ":80", "?7", ":22"}, rescan(t, w))
	assert.Empty(t, w.Unmatched())

	assert.Equal(t, []string{"+5", ":80", "+6"}, say(w.Asked(5)))
	assert.Empty(t, say(w.Asked(5)), "asked once is enough")
	assert.Empty(t, say(w.Asked(8)), "not a candidate")
	assert.Equal(t, []string{":80", ":22"}, rescan(t, w))

	f.put(8, fakeProcess{parent: 1, start: 4, exe: "/bin/quiet", ports: []uint16{90}})
	assert.Equal(t, []string{"?8", ":90"}, say(w.Listen(8)))

	f.put(5, fakeProcess{parent: 1, start: 1, exe: "/bin/other", ports: []uint16{80}})
	assert.Equal(t, []string{"?5", ":80"}, say(w.Exec(5)), "the new program was asked nothing")
	targets, candidates := w.Targets()
	assert.Equal(t, 1, targets)
	assert.Equal(t, 3, candidates)
}

// The kernel side drops a port as soon as one of the sockets that listen on it
// by SO_REUSEPORT is closed.
func TestAPortThatTheKernelSideHasDroppedIsToldAgainAsLongAsItIsListenedOn(t *testing.T) {
	f := newFakeProc(t)
	f.put(5, fakeProcess{parent: 1, start: 1, exe: "/bin/server", ports: []uint16{80, 81}})
	f.put(6, fakeProcess{parent: 5, start: 2, exe: "/bin/server", ports: []uint16{80}})
	for name, rules := range map[string][]Rule{"targets": {{Executable: "server"}}, "candidates": nil} {
		t.Run(name, func(t *testing.T) {
			w := NewWatcher(f.proc(), rules, 1)
			assert.Subset(t, rescan(t, w), []string{":80", ":81"})
			assert.ElementsMatch(t, []string{":80", ":81"}, rescan(t, w), "each once, though two processes have it")
		})
	}
	w := NewWatcher(f.proc(), nil, 1)
	rescan(t, w)
	f.put(5, fakeProcess{parent: 1, start: 1, exe: "/bin/server", ports: []uint16{81}})
	f.remove(6)
	assert.ElementsMatch(t, []string{"-6", ":81"}, rescan(t, w), "nobody listens on 80 any more")
}

func TestADaemonThatForksAndExitsBeforeItIsLookedAtIsFoundByTheNextRescan(t *testing.T) {
	for name, rules := range map[string][]Rule{
		"without rules": nil, "by executable": {{Executable: "nginx"}}, "by port": {{Ports: []uint16{80}}},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFakeProc(t)
			w := NewWatcher(f.proc(), rules, 1)
			assert.Empty(t, rescan(t, w))
			// process 5 has begun to listen, and is gone; its child was forked before
			f.put(6, fakeProcess{parent: 1, start: 2, exe: "/bin/nginx", ports: []uint16{80}})
			f.put(7, fakeProcess{parent: 6, start: 3, exe: "/bin/nginx", ports: []uint16{80}})
			assert.Empty(t, say(w.Exec(5)))
			assert.Empty(t, say(w.Listen(5)))
			if rules == nil {
				assert.Equal(t, []string{"?6", ":80", "?7"}, rescan(t, w))
			} else {
				assert.Equal(t, []string{"+6", ":80", "+7"}, rescan(t, w))
			}
		})
	}
}

func TestTheReceiverNeverWatchesItself(t *testing.T) {
	f := newFakeProc(t)
	f.put(5, fakeProcess{parent: 1, start: 1, exe: "/bin/sh"})
	f.put(6, fakeProcess{parent: 5, start: 2, exe: "/bin/otelcol", ports: []uint16{4317}})
	for _, rules := range [][]Rule{nil, {{PID: 6}}, {{Executable: "sh"}}} {
		w := NewWatcher(f.proc(), rules, 6)
		for _, s := range append(rescan(t, w), say(w.Listen(6))...) {
			assert.NotContains(t, s, "6")
		}
	}
}

func TestAProcFileSystemThatCannotBeReadIsAnError(t *testing.T) {
	w := NewWatcher(NewProc(t.TempDir()+"/absent"), nil, 1)
	_, err := w.Rescan()
	require.Error(t, err)
}

// The first thread of a process may end before the others: on a real system, since
// how /proc shows that is the kernel's.
func TestATargetWhoseFirstThreadHasEndedStaysOne(t *testing.T) {
	gcc, err := exec.LookPath("gcc")
	if err != nil {
		t.Skip("needs gcc to build a program whose first thread ends")
	}
	dir := t.TempDir()
	require.NoError(t, os.WriteFile(dir+"/leaderless.c", []byte(`
		#include <pthread.h>
		#include <unistd.h>
		static void *rest(void *arg) { for (;;) pause(); return arg; }
		int main(void)
		{
			pthread_t t;
			char go;
			pthread_create(&t, 0, rest, 0);
			if (read(0, &go, 1) == 1)
				pthread_exit(0);
			return 1;
		}`), 0o644))
	out, err := exec.Command(gcc, "-pthread", "-o", dir+"/leaderless", dir+"/leaderless.c").CombinedOutput()
	require.NoError(t, err, "%s", out)
	cmd := exec.Command(dir + "/leaderless")
	in, err := cmd.StdinPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	defer func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	}()
	pid := uint32(cmd.Process.Pid)
	proc := NewProc("/proc")
	require.Eventually(t, func() bool {
		p, err := proc.Process(pid)
		return err == nil && p.Executable == "leaderless"
	}, 5*time.Second, time.Millisecond)
	w := NewWatcher(proc, []Rule{{PID: pid}}, 1)
	assert.Equal(t, []string{fmt.Sprintf("+%d", pid)}, rescan(t, w))
	assert.False(t, proc.Leaderless(pid))
	_, err = in.Write([]byte("x"))
	require.NoError(t, err)
	require.Eventually(t, func() bool { return proc.Leaderless(pid) }, 5*time.Second, time.Millisecond)
	assert.Empty(t, rescan(t, w))
	require.NoError(t, cmd.Process.Kill())
	require.Eventually(t, func() bool {
		changes, err := w.Rescan()
		return err == nil && len(changes) == 1 && changes[0].Untrack == pid
	}, 5*time.Second, time.Millisecond, "a process that has ended is let go, be it a zombie")
}
