package spikepolicyextension

import (
	"context"
	"fmt"
	"sync"

	"github.com/open-telemetry/opentelemetry-collector-contrib/processor/tailsamplingprocessor/pkg/samplingpolicy"
	"go.opentelemetry.io/collector/component"
	"go.opentelemetry.io/collector/confmap"
	"go.opentelemetry.io/collector/extension"

	"github.com/ebpfllm/ebpfllm/processor/spikesamplingprocessor"
)

// Type is the extension's type, and by that the type of tail_sampling's policy.
var Type = component.MustNewType("spike_policy")

// Config is empty: each policy of tail_sampling configures itself.
type Config struct {
	// prevent unkeyed literal initialization
	_ struct{}
}

// NewFactory returns the factory of the extension.
func NewFactory() extension.Factory {
	return extension.NewFactory(
		Type,
		func() component.Config { return &Config{} },
		func(_ context.Context, set extension.Settings, _ component.Config) (extension.Extension, error) {
			return &policies{set: set.TelemetrySettings}, nil
		},
		component.StabilityLevelDevelopment,
	)
}

// policies makes tail_sampling's spike policies and ends them.
type policies struct {
	set  component.TelemetrySettings
	mu   sync.Mutex
	made []*spikesamplingprocessor.Evaluator
}

var _ samplingpolicy.Extension = (*policies)(nil)

// NewEvaluator implements samplingpolicy.Extension. cfg is what stands under
// spike_policy in the policy of tail_sampling.
func (p *policies) NewEvaluator(policyName string, cfg map[string]any) (samplingpolicy.Evaluator, error) {
	c := spikesamplingprocessor.DefaultEvaluatorConfig()
	if err := confmap.NewFromStringMap(cfg).Unmarshal(&c); err != nil {
		return nil, fmt.Errorf("policy %q: %w", policyName, err)
	}
	e, err := spikesamplingprocessor.NewEvaluator(policyName, p.set, c)
	if err != nil {
		return nil, err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.made = append(p.made, e)
	return e, nil
}

// Start implements component.Component.
func (*policies) Start(context.Context, component.Host) error { return nil }

// Shutdown implements component.Component.
func (p *policies) Shutdown(context.Context) error {
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, e := range p.made {
		e.Shutdown()
	}
	p.made = nil
	return nil
}
