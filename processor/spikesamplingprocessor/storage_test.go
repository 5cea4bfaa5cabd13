package spikesamplingprocessor

import (
	"bufio"
	"context"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/open-telemetry/opentelemetry-collector-contrib/extension/storage/filestorage"
	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"go.opentelemetry.io/collector/component"
	"go.opentelemetry.io/collector/component/componenttest"
	"go.opentelemetry.io/collector/consumer/consumertest"
	"go.opentelemetry.io/collector/extension"
	"go.opentelemetry.io/collector/extension/extensiontest"
	"go.opentelemetry.io/collector/pdata/pcommon"
	"go.opentelemetry.io/collector/pdata/ptrace"
)

var storageID = component.MustNewID("file_storage")

// host is a collector with contrib's file_storage.
type host struct {
	extensions map[component.ID]component.Component
}

func (h host) GetExtensions() map[component.ID]component.Component { return h.extensions }

func newHost(tb testing.TB, dir string) host {
	tb.Helper()
	f := filestorage.NewFactory()
	cfg := f.CreateDefaultConfig().(*filestorage.Config)
	cfg.Directory = dir
	set := extensiontest.NewNopSettings(f.Type())
	var ext extension.Extension
	ext, err := f.Create(context.Background(), set, cfg)
	require.NoError(tb, err)
	require.NoError(tb, ext.Start(context.Background(), componenttest.NewNopHost()))
	tb.Cleanup(func() { require.NoError(tb, ext.Shutdown(context.Background())) })
	return host{map[component.ID]component.Component{storageID: ext}}
}

func withStorage(c *Config) { c.Storage = &storageID }

func TestARestartIsNotBlind(t *testing.T) {
	dir := t.TempDir()
	h := newHarnessOn(t, withStorage, newHost(t, dir))
	h.warm(map[string]float64{"stage.lock": 0.001})
	require.NoError(t, h.p.Shutdown(context.Background()))

	for _, tt := range []struct {
		name  string
		dir   string
		state string
	}{{"with what was saved", dir, "own"}, {"without", t.TempDir(), ""}} {
		t.Run(tt.name, func(t *testing.T) {
			h := newHarnessOn(t, withStorage, newHost(t, tt.dir))
			h.clock = epoch.Add(time.Minute)
			h.send(h.slow(1, map[string]float64{"stage.lock": 0.3})) // below the fallback threshold
			h.pass(10 * time.Second)
			if tt.state == "" {
				assert.Empty(t, h.kept())
				return
			}
			require.Len(t, h.kept(), 1)
			assert.Equal(t, tt.state, str(h.kept()[traceID(1)][0], attrBaselineState))
			assert.Empty(t, h.sum("traces_lost_at_restart", "reason"), "it was shut down, not killed")
		})
	}
}

func TestADamagedStorageIsSaidAndLearnedAnew(t *testing.T) {
	on := newHost(t, t.TempDir())
	h := newHarnessOn(t, withStorage, on)
	h.warm(map[string]float64{"stage.lock": 0.001})
	h.pass(2 * saveInterval)
	ctx := context.Background()
	data, err := h.p.memory.client.Get(ctx, `baseline/"llm"/"chat"`)
	require.NoError(t, err)
	require.NotEmpty(t, data)
	require.NoError(t, h.p.Shutdown(ctx))
	m, err := openMemory(ctx, on, &storageID, h.p.id)
	require.NoError(t, err)
	data[len(data)/2]++
	require.NoError(t, m.client.Set(ctx, `baseline/"llm"/"chat"`, data))
	require.NoError(t, m.client.Set(ctx, keyUndecided, []byte("?")))
	require.NoError(t, m.close(ctx))
	h = newHarnessOn(t, withStorage, on)
	assert.Equal(t, map[string]int64{"": 2}, h.sum("storage_errors", "reason"))
	h.send(h.slow(1, map[string]float64{"stage.lock": 1.5}))
	h.pass(10 * time.Second)
	assert.Equal(t, "parent", str(h.kept()[traceID(1)][0], attrBaselineState), "the service's series could be read")
}

func TestAStorageThatIsNotThereIsNamed(t *testing.T) {
	cfg := defaultConfig()
	withStorage(cfg)
	p := newTestProcessor(t, cfg, consumertest.NewNop())
	err := p.Start(context.Background(), componenttest.NewNopHost())
	require.ErrorContains(t, err, `storage "file_storage" is not there: define it under extensions`)
	require.NoError(t, p.Shutdown(context.Background()))
}

// The figures of the crash test: traces that are decided to be kept when the
// process is killed, and those that are not decided.
const (
	crashKept      = 50
	crashUndecided = 20
	crashDir       = "SPIKE_SAMPLING_CRASH_DIR"
)

// tell says that it was called, and never returns.
type tell struct{ consumertest.Consumer }

func (tell) ConsumeTraces(context.Context, ptrace.Traces) error {
	fmt.Println("sending")
	select {}
}

// However long the next component takes: what is decided meanwhile is written
// down, and what is undecided counted.
func TestKilledInTheMidstOfSendingNoKeptTraceIsLostAndTheUndecidedAreCounted(t *testing.T) {
	dir := t.TempDir()
	cmd := exec.Command(os.Args[0], "-test.run", "^TestTheProcessThatIsKilled$")
	cmd.Env = append(os.Environ(), crashDir+"="+dir)
	out, err := cmd.StdoutPipe()
	require.NoError(t, err)
	require.NoError(t, cmd.Start())
	var lines []string
	for s := bufio.NewScanner(out); s.Scan() && s.Text() != "written"; {
		lines = append(lines, s.Text())
	}
	require.NoError(t, cmd.Process.Kill()) // SIGKILL
	err = cmd.Wait()
	require.ErrorContains(t, err, "killed", strings.Join(lines, "\n"))
	require.Equal(t, []string{"sending"}, lines, "the first trace is with the next component, and no other one")

	sink := new(consumertest.TracesSink)
	h := newHarnessOn(t, withStorage, newHost(t, dir), sink)
	require.Eventually(t, func() bool { return sink.SpanCount() >= crashKept }, 10*time.Second, time.Millisecond)
	got := map[pcommon.TraceID]bool{}
	for id := range h.kept() {
		got[id] = true
	}
	for i := range uint64(crashKept) {
		assert.Contains(t, got, traceID(i))
	}
	assert.Len(t, got, crashKept)
	assert.Equal(t, map[string]int64{"": crashUndecided}, h.sum("traces_lost_at_restart", "reason"))
	assert.Equal(t, crashUndecided, h.p.memory.undecided.Spans)

	require.NoError(t, h.p.Shutdown(context.Background()))
	again := newHarnessOn(t, withStorage, newHost(t, dir))
	require.NoError(t, again.p.Shutdown(context.Background()))
	assert.Empty(t, again.kept(), "sent once")
	assert.Empty(t, again.sum("traces_lost_at_restart", "reason"))
}

// A processor that is named in two pipelines is there twice.
func TestTwoInstancesOfOneNameDoNotShareAStorage(t *testing.T) {
	on := newHost(t, t.TempDir())
	first := newHarnessOn(t, withStorage, on)
	cfg := defaultConfig()
	withStorage(cfg)
	second := newTestProcessor(t, cfg, new(consumertest.TracesSink))
	second.id = first.p.id
	err := second.Start(t.Context(), on)
	require.ErrorContains(t, err, "a processor that is in two pipelines runs twice, and each needs a name of its own, such as spike_sampling/a and spike_sampling/b")
	require.NoError(t, second.Shutdown(t.Context()))
	require.NoError(t, first.p.Shutdown(t.Context()))
	next := newHarnessOn(t, withStorage, on) // as after a reload
	require.NoError(t, next.p.Shutdown(t.Context()))
}

func TestTheProcessThatIsKilled(t *testing.T) {
	dir := os.Getenv(crashDir)
	if dir == "" {
		t.Skip("runs as the process that the test of a crash kills")
	}
	h := newHarnessOn(t, func(c *Config) { withStorage(c); c.Policies = []PolicyConfig{keepErrs} }, newHost(t, dir), tell{})
	h.blocks = true
	for i := range uint64(crashKept) {
		h.send(makeTraces(i, app("a", span{id: 2, kind: server, to: 1, status: ptrace.StatusCodeError})))
		h.pass(time.Second)
	}
	h.pass(10 * time.Second)
	for i := range uint64(crashUndecided) {
		h.send(makeTraces(1000+i, app("a", span{id: 2, kind: server, to: 1})))
	}
	h.pass(time.Second)
	fmt.Println("written")
	select {}
}
