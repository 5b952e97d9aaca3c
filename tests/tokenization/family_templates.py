"""Chat templates with the constructs that templates of the families use, each shorter than the family's own."""

GEMMA = """{{ bos_token }}
{%- set ns = namespace(system='', offset=0) -%}
{%- if messages[0]['role'] == 'system' -%}
    {%- set ns.offset = 1 -%}
    {%- if messages[0]['content'] is string -%}
        {%- set ns.system = messages[0]['content'] ~ '\n\n' -%}
    {%- else -%}
        {%- set ns.system = messages[0]['content'][0]['text'] ~ '\n\n' -%}
    {%- endif -%}
{%- endif -%}
{%- for message in messages[ns.offset:] -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Turns must alternate between user and assistant") }}
    {%- endif -%}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\n' + (ns.system if loop.first else '') }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for part in message['content'] if part['type'] == 'text' %}{{ part['text'] | trim }}{% endfor -%}
    {%- else -%}
        {{ raise_exception("A content is text or parts") }}
    {%- endif -%}
    {{ '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif -%}
"""

PHI4_MINI = """
{%- for message in messages %}
    {%- if message['role'] == 'system' and 'tools' in message and message['tools'] is not none %}
        {{- '<|system|>' ~ message['content'] ~ '<|tool|>' ~ message['tools'] ~ '<|/tool|><|end|>' }}
    {%- else %}
        {{- '<|' ~ message['role'] ~ '|>' ~ message['content'] ~ '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{% else %}{{- eos_token }}{% endif %}
"""

OLMO2 = """{{ bos_token }}{% for message in messages %}
{% if message['role'] in ['system', 'user'] %}
{{ '<|' + message['role'] + '|>\n' + message['content'] + '\n' }}
{%- elif not loop.last %}
{{ '<|assistant|>\n'  + message['content'] + eos_token + '\n' }}
{%- else %}
{{ '<|assistant|>\n'  + message['content'] + eos_token }}
{%- endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>\n' }}
{%- endif %}
{%- endfor %}
"""

GRANITE = """
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] %}
    {%- set turns = messages[1:] %}
{%- else %}
    {%- set system = "Today's Date: " + strftime_now('%B %d, %Y') + '.\nYou are helpful.' %}
    {%- if tools and documents %}
        {%- set system = system + ' Use the tools and the documents.' %}
    {%- elif documents %}
        {%- set system = system + ' Use the documents.' %}
    {%- endif %}
    {%- set turns = messages %}
{%- endif %}
{{- '<|start_of_role|>system<|end_of_role|>' + system + '<|end_of_text|>\n' }}
{%- if tools %}
    {{- '<|start_of_role|>tools<|end_of_role|>' + tools | tojson(indent=4) + '<|end_of_text|>\n' }}
{%- endif %}
{%- for document in documents or [] %}
    {{- '<|start_of_role|>document ' + (document | tojson) + '<|end_of_role|>\n' + document['text'] }}
    {{- '<|end_of_text|>\n' if not loop.last else '' }}
{%- endfor %}
{%- for message in turns %}
    {{- '<|start_of_role|>' + message['role'] + '<|end_of_role|>' + message['content'] + '<|end_of_text|>\n' }}
    {%- if loop.last and add_generation_prompt %}
        {{- '<|start_of_role|>assistant' }}
        {%- if controls %}{{- ' ' + controls | tojson }}{%- endif %}
        {{- '<|end_of_role|>' }}
    {%- endif %}
{%- endfor %}
"""

SMOLLM3 = """
{%- set ns = namespace(mode='/think', instructions='') -%}
{%- if enable_thinking is defined and not enable_thinking %}{% set ns.mode = '/no_think' %}{% endif -%}
{%- if messages[0].role == 'system' -%}
    {%- if '/no_think' in messages[0].content %}{% set ns.mode = '/no_think' %}{% endif -%}
    {%- set ns.instructions = messages[0].content.replace('/no_think', '').replace('/think', '').rstrip() -%}
{%- endif -%}
{{- '<|im_start|>system\n' -}}
{%- set today = strftime_now("%d %B %Y") -%}
{{- 'Today Date: ' ~ today ~ '\nReasoning Mode: ' + ns.mode + '\n\n' + ns.instructions + '<|im_end|>\n' -}}
{%- for message in messages -%}
    {%- set content = message.content if message.content is string else '' -%}
    {%- if message.role == 'user' -%}
        {{ '<|im_start|>user\n' + content + '<|im_end|>\n' }}
    {%- elif message.role == 'assistant' -%}
        {%- generation -%}
        {%- if ns.mode == '/think' -%}
            {{ '<|im_start|>assistant\n' + content.lstrip('\n') + '<|im_end|>\n' }}
        {%- else -%}
            {{ '<|im_start|>assistant\n<think>\n\n</think>\n' + content.lstrip('\n') + '<|im_end|>\n' }}
        {%- endif -%}
        {%- endgeneration -%}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ '<|im_start|>assistant\n' + ('' if ns.mode == '/think' else '<think>\n\n</think>\n') }}
{%- endif -%}
"""

MISTRAL = """
{%- set ns = namespace(index=0, system='') %}
{%- if messages[0]['role'] == 'system' %}
    {%- set ns.system = messages[0]['content'] %}
    {%- set turns = messages[1:] %}
{%- else %}
    {%- set turns = messages %}
{%- endif %}
{%- set users = turns | selectattr('role', 'equalto', 'user') | list %}
{%- for message in turns %}
    {%- if message['role'] not in ['user', 'assistant'] %}{% continue %}{% endif %}
    {%- if (message['role'] == 'user') != (ns.index % 2 == 0) %}
        {{- raise_exception('After the optional system message, user and assistant alternate') }}
    {%- endif %}
    {%- set ns.index = ns.index + 1 %}
{%- endfor %}
{{- bos_token }}
{%- for message in turns %}
    {%- if message['role'] == 'user' %}
        {%- if tools is not none and message == users[-1] %}
            {{- '[AVAILABLE_TOOLS][' }}
            {%- for tool in tools or [] %}
                {{- '{' }}
                {%- for key, value in tool.items() if key != 'return' %}
                    {{- '"' + key + '": ' + (value | tojson) + (', ' if not loop.last else '') }}
                {%- endfor %}
                {{- '}' + (', ' if not loop.last else '') }}
            {%- endfor %}
            {{- '][/AVAILABLE_TOOLS]' }}
        {%- endif %}
        {{- '[INST] ' + (ns.system + '\n\n' if loop.last and ns.system else '') + message['content'] + '[/INST]' }}
    {%- elif message['role'] == 'assistant' %}
        {{- ' ' + message['content'] | trim + eos_token }}
    {%- endif %}
{%- endfor %}
"""

TEMPLATES = {
    "gemma": GEMMA,
    "phi-4-mini": PHI4_MINI,
    "olmo-2": OLMO2,
    "granite-3": GRANITE,
    "smollm3": SMOLLM3,
    "mistral": MISTRAL,
}
